"""`oomfix apply`: training scripts rewritten, and put on the disk.

The walk of one loop through the rewriter. Every stage takes a `Reading`, one state of the file with what is asked of
it, and gives edits; edits make a new text, and that a new reading. All that is told has the lines of the first one.
Following a script takes the most time: behind edits in place, what runs networks is known from before
(`facts/events.py`).

1. `apply.py` has the file: its loops rewritten, imports without use taken out, local fixes made
   (`surroundings/local.py`), evaluations run through the manager (`surroundings/evaluation_calls.py`), lines broken
   that have become too long. Loops come first because what they become mends findings, or takes their lines away;
   evaluations need the manager that loops brought.
2. `loop_attempts.py` edits what keeps loops from being split, without a change of what the script does, and keeps the
   attempt that splits most: apex taken out, backwards behind autocast, metrics behind the blocks around forwards,
   helpers that run the backward written out where they are called.
3. `loop_rewriter.py` has the loops of the file as they stand then, all together, since one manager serves them:

   a. `loops.py` gives each loop a `Verdict`: left alone, in place, or in place with backwards that may be lifted. What
      two loops share is rewritten for both or for neither; who scales losses is decided for the file (`scaling_of`).
   b. `in_place/windows.py` folds accumulation windows that lose something into `memory.accumulate`. The folded script
      is read and judged anew: its steps then run under another test.
   c. `in_place/inplace.py` hands backward, step, clip and precision to the manager where they stand (`facts/amp.py`,
      `in_place/resets.py`); with it go `memory.prepare` (`surroundings/prepare.py`), `runtime.free` between stages
      (`surroundings/stages.py`), arguments of loaders, and the manager itself (`text/header.py`), which has to stand
      above its first use.
   d. `preparations/same_branches.py` makes branches one that differed in their precision alone, as long as there are
      any.
   e. `slicing/lifter.py` tries the backwards of each loop, now `memory.backward(loss)`, as functions, all of one loop
      or none. For each, `slicing/slices.py` finds what the loss is computed from: which statements (the slice), where
      the others go (`slicing/between.py`), what it takes and gives (`slicing/signature.py`). What it finds is a `Lift`,
      or the reason why it cannot be one. Checks of a whole `Lift` follow (`slicing/kept_graphs.py`,
      `facts/forward_hooks.py`, ...), and `slicing/lifting.py` writes it.
   f. What is not lifted is prepared, each time by the first of these that finds something to do, and tried again:
      joined lines apart, losses and batches named, logs and later losses behind (`preparations/in_turn.py`).
      Preparations are kept only where they made more of a loop.
   g. Models that still run outside of lifted functions are called in the preset's precision
      (`in_place/model_calls.py`), last: only then is it known which do. An audit writes nothing and stops ahead of it.

`files.py` does this for paths and notebooks, `writing.py` writes, `summary.py` tells; `proving/proof.py` and
`proving/trial.py` run the script before and after.
"""
