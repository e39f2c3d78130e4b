#!/usr/bin/env bash
# One real vLLM engine on the CPU, in the foreground, its KV events published:
#   serve.sh VENV MODEL_DIR HTTP_PORT PUB_PORT REPLAY_PORT [more `vllm serve` arguments]
#
# MODEL_DIR needs a config and a tokenizer only: the weights are made up, equal in every engine. It is served as "tiny".
# Rank r of a data-parallel engine publishes on PUB_PORT + r and answers replays on REPLAY_PORT + r.
# Several processes: start it with setsid, stop it by SIGTERM to the group. Until it is ready SIGTERM does nothing.
set -euo pipefail

venv=${1:?} model=${2:?} port=${3:?} pub=${4:?} replay=${5:?}
shift 5

unset PYTHONDONTWRITEBYTECODE # else every start of each process compiles thousands of files again
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1
# By default every engine pins its threads to the same first cores.
export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1

# The CPU's attention wants a block size that is a multiple of 32. vLLM binds the PUB socket only where the endpoint
# has a "*"; the replay socket is always bound.
exec "$venv/bin/vllm" serve "$model" --served-model-name tiny --load-format dummy --host 127.0.0.1 --port "$port" \
  --block-size 32 --max-model-len 1024 --enforce-eager --enable-prefix-caching --enable-prompt-tokens-details \
  --kv-events-config "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$pub\",\"replay_endpoint\":\"tcp://127.0.0.1:$replay\",\"topic\":\"kv@$port@tiny\"}" \
  "$@"
