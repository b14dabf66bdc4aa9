# GLM-4.5, 355B with 32B active: three dense layers, then 89 of experts.
DENSE_LAYERS=3
EXPERT_LAYERS=89

MODEL_ARGS=(
    --num-layers $((DENSE_LAYERS + EXPERT_LAYERS))
    --hidden-size 5120
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --ffn-hidden-size 12288
    --add-qkv-bias
    --disable-bias-linear
    --qk-layernorm

    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --rotary-percent 0.5
    --rotary-base 1000000
    --vocab-size 151552
    --untie-embeddings-and-output-weights

    # experts
    --num-experts 160
    --moe-layer-freq [0]*$DENSE_LAYERS+[1]*$EXPERT_LAYERS
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536
    --moe-router-topk 8
    --moe-router-topk-scaling-factor 2.5
    --moe-router-pre-softmax
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 0
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
)
