"""Checkpoints: what a run needs to go on, in files that are whole or not there.

In: a module, its optimizer and what the user keeps beside them. Out: a folder that loads under another plan and number
of processes. `training_state` names every value, `identities` compares names with a manifest, `tensor_files` moves
values (torch.distributed.checkpoint), `checkpoint_folders` commits; `checkpoint` has what users call.
"""
