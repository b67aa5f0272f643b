#!/bin/bash
# One run at a constant rate on docs, and nine of 120 decaying steps on code, two at a time: after ../2026-11-25-mixtures/run.sh,
# which makes the data. bash records/2026-11-25-other-data-at-the-end/run.sh, in the clone.
set -e
export OMP_NUM_THREADS=1
here=records/2026-11-25-other-data-at-the-end
runs=records/2026-11-25-mixtures/runs.py
common="--total-batch-size 1024 --val-tokens 16384 --val-every 300 --sample-every 0 --checkpoint-every 0 --keep-best false --no-compile"
python train_gpt2.py --preset quickstart --data python_docs --decay-fraction 0 --max-steps 300 $common \
  --out-dir log/constant > log/constant.console

# share 0: the documentation is validated on, and never trained on
second="--data python_docs code --data-weights 0 1 --muon-momentum-warmup 0 $common --val-every 120"
scratch="--preset quickstart --max-steps 120 --decay-fraction 1"
for seed in 1 2 3; do
  echo $second --seed $seed --branch-from log/constant --max-steps 420 --decay-fraction 0.2857142857 --out-dir log/kept-$seed
  echo $second --seed $seed $scratch --warmup-steps 0 --init-from log/constant --out-dir log/weights-$seed
  echo $second --seed $seed $scratch --out-dir log/scratch-$seed
done > log/ends.txt
python $runs 0 < log/ends.txt & python $runs 1 < log/ends.txt & wait

for run in log/{constant,kept-?,weights-?,scratch-?}; do
  mkdir -p $here/$(basename $run)
  grep -E " (val|val_bpb)(/[a-z_]+)? " $run/log.txt > $here/$(basename $run)/log.txt
  cp $run/run.txt $here/$(basename $run)/
done
python $here/plot.py
