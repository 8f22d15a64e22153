#!/bin/sh
# The trainings that results still lack, in the order of docs/experiments.md (Trainings to come), one after the other on
# one thread. Killed at any time and started again, it goes on where it was.
#
#     nice -n 15 sh experiments/plan.sh OUT [NAME ...]
#
# NAMEs are the studies to train, by default all. OUT/NAME is a study with its report; NAME is that of the report in
# docs/reports which it adds or replaces. `python -m experiments work OUT/NAME --threads 1` trains its cells beside it.
set -u
out=${1:?"usage: sh experiments/plan.sh OUT [NAME ...]"}
shift
chosen=" $* "

study() { # NAME RECIPE OPTION ...
    name=$1 recipe=$2
    shift 2
    case $chosen in "  " | *" $name "*) ;; *) return ;; esac
    [ -e "$out/$name/summary.md" ] && return
    [ -e "$out/$name/finished.json" ] ||
        python -m experiments run "$recipe" --preset cpu --threads 1 --keep-going --resume \
            --cache "$out/cache" --out "$out/$name" "$@" &&
        python -m experiments report "$out/$name" --hide-samples && return
    status=$?
    echo "$name: ended with $status" >&2
    [ "$status" -lt 75 ] || exit "$status" # stopped by a signal, where what comes next would be as well
}

study 000-causal-more-cpu 000-causal --set activations=relu,zeros --set alphas=1,2 --seeds 3 4 5 6 7
study 005-causal-scores-cpu 005-causal --set methods=sink,ssmax,softpick,stick_breaking
study 005-causal-states-cpu 005-causal --set methods=decay_heads,decay_tokens,gated_linear
study 005-causal-delta-cpu 005-causal --set methods=delta,gated_delta
study 005-causal-floors-cpu 005-causal --set methods=relu,average,zeros
study 005-causal-kimi-cpu 005-causal --set methods=kimi_delta
study 001-table4-floor-cpu 001-table4 --set methods=zeros
study 002-table6-image-floors-cpu 002-table6 --set task=image --set image_side=16 --set length=256 \
    --set steps=1000 --set warmup=100 --set train_samples=22500 --set test_samples=5000 --set methods=average,zeros
study 000-masked-average-cpu 000-masked --set activations=average --set softmax=false
study 000-fig4-squared-cpu 000-fig4 --set activations=relu_squared --set alphas=0,1
study 000-causal-cpu 000-causal
study 000-masked-cpu 000-masked
