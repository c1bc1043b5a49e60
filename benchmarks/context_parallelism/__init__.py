"""Ways to split a sequence, measured against each other: `python -m benchmarks.context_parallelism`.

settings.py      lengths, links and nodes
model.py         a small causal decoder with grouped queries, whose attention can be replaced
alternatives.py  ring, Ulysses, gather, both at once, and the free choice, as plans of ours
by_hand.py       a ring and Ulysses written with torch.distributed alone
rows.py          what a setting's row says, closed forms beside it
"""
