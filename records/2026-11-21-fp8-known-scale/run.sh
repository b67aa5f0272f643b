#!/bin/bash
# bfloat16, fp8 and float32 over the same 1,000 steps, two seeds: run.sh RUNS DATA
for seed in 1337 1; do for dtype in bfloat16 fp8 float32; do
    python train_gpt2.py --data "$2" --out-dir "$1/$dtype-$seed" --dtype $dtype --seed $seed --n-layer 4 --n-head 4 \
        --n-embd 256 --block-size 128 --sequence-length 128 --batch-size 8 --total-batch-size 1024 --max-steps 1000 \
        --warmup-steps 100 --val-every 250 --val-tokens 131072 --sample-every 0 --hellaswag-every 0 --no-compile
done; done
