#!/bin/bash
# All runs of this record, one after the other, from the root of the repository. Arguments: docs_edu/*.parquet
set -e
python fineweb.py --input "$@" --tokenizer bytes --out-dir docs_bytes

train() {
    python train_gpt2.py --preset quickstart --data docs_bytes --n-layer 2 --n-head 2 --n-embd 64 \
        --block-size 64 --sequence-length 64 --batch-size 16 --total-batch-size 1024 \
        --val-every 25 --val-tokens 65536 --sample-every 0 --no-keep-best "$@"
}

# one run at a constant rate, which keeps its checkpoints, and three branches that decay over their last fifth
train --out-dir log/constant --max-steps 1000 --decay-fraction 0 --checkpoint-every 200 --milestone-every 200
for step in 400 600 800; do
    train --out-dir log/decay-from-$step --branch-from log/constant/model_00$step.pt \
        --max-steps $((step * 5 / 4)) --decay-fraction 0.2 --checkpoint-every 0
done

# runs of these lengths from scratch with two seeds; the shortest also with the preset's longer decay and a cosine
scratch() {
    train --out-dir log/scratch/$1-$2-seed-$3 --max-steps $2 --checkpoint-every 0 --seed $3 "${@:4}"
}
for steps in 500 750 1000; do
    scratch decay-20% $steps 1337 --decay-fraction 0.2
    scratch decay-20% $steps 1 --decay-fraction 0.2
done
scratch decay-70% 500 1337
scratch cosine 500 1337 --schedule cosine --min-lr 0
