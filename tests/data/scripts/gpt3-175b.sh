#!/bin/bash
# Pretrain a GPT of 175 billion parameters.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=6000
NUM_NODES=16
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINTS=$1 # a folder
LOGS=$2
VOCAB=$3
MERGES=$4
DATA=$5

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
GPT_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # the library's choice
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
SPLIT_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)
DATA_ARGS="
    --data-path $DATA
    --vocab-file $VOCAB
    --merge-file $MERGES
    --split 949,50,1
"
LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --save $CHECKPOINTS
    --load $CHECKPOINTS
    --eval-iters 10
    --tensorboard-dir $LOGS
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${SPLIT_ARGS[@]} \
    $DATA_ARGS \
    ${LOGGING_ARGS[@]}
