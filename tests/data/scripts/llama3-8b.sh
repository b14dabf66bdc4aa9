# Llama 3 8B in bfloat16, sequence 8192.
TP_SIZE=${TP_SIZE:-1}
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --init-method-std 0.0134
    --attention-backend fused
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --transformer-impl transformer_engine
)
OTHER_ARGS=(
    --micro-batch-size 1 --global-batch-size 128
    --bf16
    --tensor-model-parallel-size ${TP_SIZE}
    --vocab-size 128256
    "--tokenizer-type NullTokenizer"
    --overlap-grad-reduce --overlap-param-gather
    --use-distributed-optimizer
    --profile --profile-ranks 0 1 2 3 --profile-step-start 4
)
