"""Do two versions of a training script train the same? Their optimizer steps recorded, and compared.

`comparison` and `recorder_hook` import no torch; `recorder` runs inside the script's own process, behind its torch.
"""
