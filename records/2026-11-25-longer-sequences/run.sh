#!/bin/bash
# Four ways of extending the position embeddings of log/constant, which ../2026-11-25-other-data-at-the-end/run.sh makes, and
# 80 decaying steps of each, two runs at a time: bash records/2026-11-25-longer-sequences/run.sh, in the clone.
set -e
export OMP_NUM_THREADS=1
here=records/2026-11-25-longer-sequences
runs=records/2026-11-25-mixtures/runs.py
for way in last mean linear tile; do python $here/extend.py log/constant $way log/extended/$way; done

common="--preset quickstart --total-batch-size 1024 --val-tokens 16384 --data python_docs --max-steps 80 --decay-fraction 1 --warmup-steps 0 --muon-momentum-warmup 0
  --val-every 40 --sample-every 0 --checkpoint-every 0 --keep-best false --no-compile"
for seed in 1 2 3; do
  for way in last mean linear tile; do
    echo $common --seed $seed --init-from log/extended/$way --sequence-length 256 --out-dir log/$way-$seed
  done
done > log/longer.txt
python $runs 0 < log/longer.txt & python $runs 1 < log/longer.txt & wait

for run in log/{last,mean,linear,tile}-?; do
  mkdir -p $here/$(basename $run)
  grep -E " (val|val_bpb) " $run/log.txt > $here/$(basename $run)/log.txt
  cp $run/run.txt $here/$(basename $run)/
done
python $here/halves.py > $here/halves.txt
python $here/plot.py
