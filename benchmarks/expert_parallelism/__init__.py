"""Ways to run mixtures of experts on several ranks, measured against each other.

    python -m benchmarks.expert_parallelism --profile --resume                         # all sixteen settings
    python -m benchmarks.expert_parallelism --setting few-wide-uniform-200mbit         # one

settings.py      few wide or many narrow experts, evenly loaded or not, on four networks
model.py         a small Llama with mixtures in a loop, and biases that give experts the loads one wants
alternatives.py  dispatch, gather, replicated experts, and the free choice, as plans of ours
by_hand.py       dispatch written with torch.distributed alone
rows.py          what a setting's row says
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch begins: its threads would be lost in the forks
