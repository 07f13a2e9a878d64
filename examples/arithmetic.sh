#!/bin/bash
# GRPO on sums in files of one's own, by overrides alone: a checkpoint, questions, a reward.
#
#     examples/arithmetic.sh                                        # about a minute of CPU time
#     examples/arithmetic.sh seed=1 mode=async producer.order=ready run_name=sums-async
#
# Further arguments are overrides. Files go to outputs/sums, results to outputs/train_grpo/<run_name>.
set -e
python=${PYTHON:-python}
files=${SUMS:-outputs/sums}
test -e "$files/homework.jsonl" || "$python" -m examples.arithmetic "$files"
"$python" examples/train_grpo.py run_name=sums \
    model.path="$files/model" reward=examples.arithmetic:is_right \
    data=jsonl data.path="$files/questions.jsonl" data.held_out_path="$files/held_out.jsonl" \
    "data.system_prompt='Answer with three digits.'" \
    warmup=supervised warmup.source.kind=jsonl warmup.source.path="$files/homework.jsonl" \
    warmup.learning_rate=3e-3 warmup.batch_size=64 warmup.max_steps=2000 \
    warmup.target_reward=0.35 warmup.first_check=200 warmup.check_interval=20 \
    algorithm.groups_per_step=32 algorithm.max_new_tokens=4 \
    engine.max_sequence_length=32 engine.max_requests=512 \
    trainer=cpu trainer.num_steps=80 trainer.learning_rate=6e-4 "$@"
