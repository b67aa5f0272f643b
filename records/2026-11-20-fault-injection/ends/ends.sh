#!/bin/bash
# the seconds that the test of a NaN on one of two ranks takes, again and again; 60 and a failure is a hang: ends.sh CHECKOUT TIMES
cd "$1"
for i in $(seq 1 $2); do
    start=$SECONDS
    python -m pytest tests/test_train.py -k nan_on_one_rank > /dev/null 2>&1; status=$?
    echo "run $i: status $status, $((SECONDS - start)) s"
    [ $status = 0 ] || break
done
