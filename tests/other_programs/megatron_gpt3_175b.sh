#!/bin/bash
# In the style of NVIDIA/Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh (2024), shortened.
GPUS_PER_NODE=8
NUM_NODES=16
CHECKPOINT_PATH=$1 #<Specify path>
VOCAB_FILE=$2
MERGE_FILE=$3
DATA_PATH=$4

GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
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
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
DATA_ARGS=(
    --data-path $DATA_PATH
    --vocab-file $VOCAB_FILE
    --merge-file $MERGE_FILE
    --split 949,50,1
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
    ${DATA_ARGS[@]} \
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
    --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
