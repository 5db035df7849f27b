"""How right `oomfix audit` was on scripts that nobody had developed it on: the first run on sets of the corpus.

    python -m bench.first_run

Reads bench/corpus/first-run.tsv and writes bench/results/audit-first-run.md. The rows are data of the past and stay as
they are: every place that the auditor of that day reported or a reviewer had labelled, with the label as it was before
anybody ran the auditor on the script (`frozen`) and as it was after every disagreement had been read again
(`corrected`). Today's figures on the same scripts are those of `bench.corpus`.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.corpus import SHEET, score_table
from bench.scoring import Mark, Score, judge, scores

RESULT = Path(__file__).parent / "results" / "audit-first-run.md"


class Round(NamedTuple):
    """A set of scripts that was labelled before the auditor ran on it."""

    name: str
    """Its name in the column `set` of scripts.tsv."""
    revision: str
    """The revision of this project that ran."""
    day: str
    choice: str
    """How its scripts were chosen, and what it shows."""


ROUNDS = [
    Round(
        "37a",
        "14d933a",
        "2026-11-29",
        """Half as mixed as public training code is (22 scripts: 79/0/6), half drawn for evaluations without `no_grad`,
for what is kept and for accumulation (25: 102/7/4). Wrong are a forward beside the one that its function
backpropagates, the value of a critic, a device that is only printed, a layer whose network lies elsewhere. Missed are
tensors made for functions of other files, `model.backward()` without a loss, `_decode`, and a network that nothing
names as one. All but the last are mended.""",
    ),
    Round(
        "36a",
        "cd32818",
        "2026-11-29",
        """As mixed as public training code is; 13 of the 47 scripts were drawn for what they keep, add up or evaluate.
Missed are a window behind a flag that is compared with 0, outputs joined under a name that is None ahead of its loop,
a detector of another file beside a `GradScaler` that no autocast goes with, and a call beside the end of a loop. All
but the detector are mended.""",
    ),
    Round(
        "35a",
        "d8dceb9",
        "2026-11-29",
        """Half as mixed as public training code is, half drawn for accumulation and hand-written AMP; 42 scripts, of
which about eight really accumulate. The wrong finding is an average of weights that is given a network
(`ema_model(model)`), which is no forward: mended.""",
    ),
    Round(
        "34a",
        "159a677",
        "2026-11-29",
        """As mixed as public training code is; 56 scripts, not chosen for being small or clean. The wrong finding is a
value that is written into a tensor without gradients, which takes no graph along. Missed are two forwards of critics
that a comprehension runs (`[q(x) for q in self.critics]`) and samples that a trainer keeps with their graph. The first
and the critics are mended.""",
    ),
    Round(
        "34b",
        "159a677",
        "2026-11-29",
        """Drawn for the rules that are rare: passes that evaluate, extract or decode, lists of what comes out, running
sums, states of recurrent networks, accumulation, scalers; 41 scripts. All that stays wrong after rereading is in one
script, whose training was never finished: its epochs run networks and no backward. Missed are a running sum in a tuple
that is written anew, a network that predicts losses, and features of a style. The sum and the network are mended.""",
    ),
    Round(
        "34c",
        "159a677",
        "2026-11-29",
        """Second files of 20 of the repositories of set 34b, on other subjects (evaluation, sampling, inference),
labelled and frozen with it. Wrong are beams of a decoder, which go with their sentence. Missed are two networks that
sample, in files that were not read for want of a word. All are mended.""",
    ),
    Round(
        "33b",
        "bd46e8c",
        "2026-11-28",
        """As mixed as public training code is; 60 scripts, not chosen for being small or clean. Nothing is wrong.
Missed are features of a network that a statement moves, a term of a loss from a policy's probabilities, twice a part of
a network under a name of its own (`vgg = net.vgg`), a loss added by every key of its parts, and a graph that is kept
for an attribute that nothing reads. All but that part are mended. One more that the reader had labelled goes into no
backward.""",
    ),
    Round(
        "33a",
        "bd46e8c",
        "2026-11-28",
        """Drawn for two rules: scripts that evaluate, test, sample, translate or extract features, and keep lists of
what comes out; 59 scripts. Six wrong findings are in one script that draws saliency maps, whose networks run a backward
for themselves; the others are in a class without a forward that trains itself, and two loops in which an agent was told
not to train. Missed are most of the losses of that class, functions whose results leave the file, and samples that are
taken off their graph. The maps, the agent, the losses and the samples are mended.""",
    ),
    Round(
        "32b",
        "68af84a",
        "2026-11-28",
        """Drawn as a stranger would who measures tools: many subjects, many kinds of authors, a few frameworks; 50
scripts. Wrong are a forward that only runs without a GPU, a penalty told at the call of the helper that runs it, and
twice the `encoder` of a loader, which is a tokenizer. Missed are that penalty's own forward and `set_forward_loss` of a
network in another file. All are mended. Four more that the reader had labelled go into no backward, or only
detached.""",
    ),
    Round(
        "32a",
        "68af84a",
        "2026-11-28",
        """Drawn for two rules: scripts whose text evaluates, predicts, samples, attacks, or collects losses, outputs
and features, near misses as welcome as hits; 65 scripts. Wrong are two lists of what a method of another file gives (a
number, `.data`), a forward of an attack twice, and twice a number of networks that was taken for one. Missed are a
device that is a setting under the name of a parameter, a method of an agent whose name says nothing, and two forwards
at the top of an attack. The number and the device are mended.""",
    ),
    Round(
        "31c",
        "d09359b",
        "2026-11-28",
        """Drawn on purpose for what is rare: scripts whose text holds `retain_graph`, `accumulation_steps`,
`GradScaler`, `unscale_`, sums and lists of losses, states or `empty_cache`, near misses as welcome as hits, of any
owner; 37 scripts. Nothing is wrong. Missed are fast weights in an ordered dict, a log probability that an object was
handed, both mended, a network called like a flag, a counter that starts with the number of an iteration, a loss divided
by something else, and four forwards that no backward goes through, labelled all the same.""",
    ),
    Round(
        "31b",
        "d09359b",
        "2026-11-28",
        """Drawn like set 22d by another reader, of owners that begin with m to z; 38 scripts. Wrong is a file that
decides for the CPU and offers an option for a GPU that it never reads. Missed are three networks that an imported
function lets train again, a loss divided on the other branch of a flag alone (all mended), an acting forward by a
method of another file, and a GAN of which one optimizer waits for its window while the other steps each time.""",
    ),
    Round(
        "31a",
        "d09359b",
        "2026-11-28",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l; 41 scripts. Wrong are
`logger.critical` and `store_model` taken for forwards, a network that trains itself asked to evaluate, and what a name
is bound to behind its last backward. Missed are seven forwards by `generate_...` methods of another file, methods of a
network that is called through `module`, an accumulator without its library in its name, and losses of a list.""",
    ),
    Round(
        "30b",
        "3d5295c",
        "2026-11-24",
        """Drawn like set 22d by another reader, of owners that begin with m to z; 51 scripts. Wrong is a loss that a
helper of another file makes a number of itself. Of the missed forwards 25 make the steps of four files without a loop
of their own, debatable after rereading as in the sets before; the others are a sample under a name that is bound anew
later, a likelihood in a test, a validation whose loss is returned, a method named like nothing that is known, and two
networks whose file says of no device.""",
    ),
    Round(
        "30a",
        "3d5295c",
        "2026-11-24",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l; 47 scripts. Of the missed
forwards six make the steps of three files without a loop of their own, debatable after rereading as in the sets before,
two are losses of other files that are given the network, two are labelled where a method is called and found within
it; the others are methods of networks of other files (three) and an acting forward by a method of an object that is
handed in.""",
    ),
    Round(
        "29b",
        "5d02435",
        "2026-11-24",
        """Drawn like set 22d by another reader, of owners that begin with m to z; 51 scripts. Ten of the wrong are
one agent that keeps the CPU as its device and hands it to its buffer; four are sums in a unit test; the rest are
distances without weights, a method that only saves, and a loop that tries a batch again. Missed are a loss module that
holds the network, a validation without a word that says so, and losses of a window that are added up undivided.""",
    ),
    Round(
        "29a",
        "5d02435",
        "2026-11-24",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l; 48 scripts. Wrong is a
sum of what is told to be no tensor. Missed are a network named in camel case, a prediction that nothing in the file
asks for, and an acting forward by a method of another file.""",
    ),
    Round(
        "28b",
        "b766fe3",
        "2026-11-24",
        """Drawn like set 22d by another reader, of owners that begin with m to z; 50 scripts. Wrong are a
sampling method that nothing in the file calls, and a table of classes taken for one of networks. Missed are loops of a
file in another of which losses are scaled, a network called as it is switched, sums of rows in a tensor, networks held
by an object that is handed in, and two evaluations without a word that says so.""",
    ),
    Round(
        "28a",
        "b766fe3",
        "2026-11-24",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l; 49 scripts. Wrong is
the self-check of a model that can only run on a CPU (all five). Missed are what is made around a network, layers run
one by one, a total over the rounds of a critic, an acting forward whose probabilities are kept, and layers of a network
that is handed in. One script parses only from Python 3.12 on: its reader had 3.11.""",
    ),
    Round(
        "27b",
        "674aa65",
        "2026-11-23",
        """Drawn like set 22d by another reader, of owners that begin with m to z; 51 scripts. Wrong are three calls
of what turns labels into numbers, named after encoders, and a script that names the GPUs there are and puts nothing on
them. Missed are Q values asked of a network by a method of its own, and the steps that prime a state.""",
    ),
    Round(
        "27a",
        "674aa65",
        "2026-11-23",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l; 41 scripts. Wrong are
losses named after the sides of a GAN, a class whose device is given as the CPU wherever it is made, predictions that an
ensemble collects for its caller, and a window of a run that counts its steps by a bar. Missed are losses that an object
of another file holds, an acting forward, and an abstract network.""",
    ),
    Round(
        "26b",
        "0dd39cc",
        "2026-11-23",
        """Drawn like set 22d by another reader, of owners that begin with m to z; 52 scripts. Wrong are two scripts
that can only run on another device than a GPU of CUDA, a method of a policy that was found in its own code instead of
where it is called, missed there, and an autocast that the label has at another line. Missed are forwards of objects of
other files, two that a function is handed wraps, and a batch loop around a loop over networks.""",
    ),
    Round(
        "26a",
        "0dd39cc",
        "2026-11-23",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l; 50 scripts, with more
places called debatable than in any set before. Nothing is missed. Wrong are two calls of a loss of the weights that
another file defines, a metric that is moved to the GPU, and the outputs of an encoder that a test keeps for its
attention.""",
    ),
    Round(
        "25b",
        "daa1f63",
        "2026-11-23",
        """Drawn like set 22d by another reader, of owners that begin with m to z; 42 scripts. Wrong are three
forwards that act on numbers in one script. Missed are forwards of objects of other files, and a list that keeps
graphs.""",
    ),
    Round(
        "25a",
        "daa1f63",
        "2026-11-23",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l; 51 scripts. Ten of the
16 missed places are in one script that scales its losses and has no autocast in sight, debatable after rereading; of
the others, three are debatable too. Wrong are two forwards of old torch on their way to an action, and a retained
graph; another one is right after rereading.""",
    ),
    Round(
        "24d",
        "200ad2c",
        "2026-11-23",
        """Drawn like set 22d by another reader, of owners that begin with m to z. 22 of the 29 missed places are in
one script whose step asks its networks by methods of their own (`gen_A.encode(x)`, `disc_A.calc_dis_loss(...)`), 18 of
them true after rereading. Wrong are losses of the weights and of SSIM taken for networks, a loop over images optimized
one by one, and a forward on its way to a picture. All but three missed places were mended after this run.""",
    ),
    Round(
        "24c",
        "200ad2c",
        "2026-11-23",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l. Eleven of the 18 missed
places are in one test whose networks are bound in another file (`self.module_E(x)`). Wrong are values kept for an
update, two scripts on the CPU, and a unit test. All but three missed places were mended after this run; two lists of
losses with their graphs, which NumPy would refuse, are taken for numbers still.""",
    ),
    Round(
        "24b",
        "200ad2c",
        "2026-11-23",
        """Drawn like set 22d by another reader, of owners that begin with m to z. Missed are methods of networks
(`model.pred_goal(x)`, `model.segmentation(x)`, five places), a network of a class without weights, a scaler that is not
used and a retained graph. Wrong is a window of one iteration. The three in one script and the window were mended after
this run.""",
    ),
    Round(
        "24a",
        "200ad2c",
        "2026-11-23",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l. Wrong are a forward
under Fabric and target values of an update, both mended after this run; three more that were wrong by the frozen
labels are right after rereading, two of them in a script that was labelled as no Python 3. Missed is a window whose
test is a function.""",
    ),
    Round(
        "23c",
        "fa42524",
        "2026-11-23",
        """Drawn like set 22c by another reader, of owners that begin with a digit or a to l. What counts as wrong are
findings of three scripts that were labelled as no Python 3: they nest quotes in f-strings, as Python 3.12 allows, and
the findings hold after rereading. Missed are three forwards of networks by other methods than their call (`predict`,
`infer`, behind `.module`), mended after this run, and an acting forward and the tail of a window, debatable after
rereading.""",
    ),
    Round(
        "23b",
        "fa42524",
        "2026-11-23",
        """Drawn like set 22d by another reader, of owners that begin with m to z. Wrong are gradients that a network
hands out and a parameter takes for losses (two), a forward under autocast on the other side of a flag, and one whose
precision apex decides. Missed are acting forwards of soft actor-critics (four), methods of networks and a retained
graph. All were mended after this run.""",
    ),
    Round(
        "22d",
        "f8ce903",
        "2026-11-23",
        """Drawn like set 22c by another reader, of owners that begin with m to z. Wrong is a network of another file
that is made in the loop of a test (`resnet18(...)` of a star import). Missed are a running mean of losses and a sum of
losses of a test within a training iteration, a policy of another file that an optimizer is made for by its own
`get_..._parameters`, and a frozen network that runs on an image which asks for gradients. All were mended after this
run.""",
    ),
    Round(
        "22c",
        "f8ce903",
        "2026-11-23",
        """Drawn like set 22a with other subjects besides, of owners that begin with a digit or a to l. Wrong is a
generator of data (two places). Missed are the `forward` that a base class leaves open (four), acting forwards whose
log probabilities are only detached (three places), methods of imported networks (two), and two retained graphs that
what an environment answers does not need; one more wrong and one more missed are the same forward, labelled where its
method is called. All were mended after this run but a forward whose output is not used and one of which only detached
values are, debatable after rereading.""",
    ),
    Round(
        "22b",
        "f8ce903",
        "2026-11-23",
        """Drawn like set 22a by another reader, of owners that begin with m to z. Wrong is the `forward` of an object
that is no network itself; missed are a method of a network of another file and a branch that a switch of the file
takes. All three were mended after this run.""",
    ),
    Round(
        "22a",
        "f8ce903",
        "2026-11-23",
        """Drawn like sets 21a and 21b, of owners that begin with a digit or a to l. Wrong are a loss behind a helper
that is called too often to be followed, and float16 with a scaler in the `backward` of another object; both were mended
after this run. Of the sixteen missed, fifteen are forwards of step methods whose loop is in another file, which are
debatable in all earlier sets and after rereading here; the other is a method of an ensemble of another file.""",
    ),
    Round(
        "21b",
        "f5a5bb7",
        "2026-11-23",
        """Drawn like set 21a by another reader, of owners that begin with m to z. Wrong is a retained graph of which
each round takes a slice. Missed are the inner loops of a meta-learner that differentiates through the steps of a
library, and an acting forward behind a default that no call of the file changes; four forwards of step methods whose
loop is in another file were made debatable, as they are in set 21a. The slice and the inner loops were mended after
this run.""",
    ),
    Round(
        "21a",
        "f5a5bb7",
        "2026-11-23",
        """Drawn by a program from names found by subject, from repositories that nobody had seen, whose owners begin
with a digit or a to l; one file of each at random. Five files were drawn again as copies of well-known ones. Wrong is
an object that switches the mode of its networks by methods of its own (three places); eight more wrong by the frozen
labels are right, in a script that its reader's Python 3.11 could not parse and the auditor reads. Missed are parts of
a network by their names (four) and by their place in a list, two forwards whose outputs are packed, an inner loop of
the same library as in set 21b, and samples that a method returns. All but the last were mended after this run.""",
    ),
    Round(
        "20e",
        "f14917f",
        "2026-11-23",
        """Drawn like set 20d by another reader, of owners that begin with m to z. Wrong are four forwards in a
network's own `forward` that a `generate` which nothing calls runs (debatable after rereading), a script that is told
`cuda=False` and one whose only device simulates quantum circuits; the last two were mended after this run. Missed are
a trial forward on a test batch, two losses summed with their graph, and one forward of a style transfer.""",
    ),
    Round(
        "20d",
        "f14917f",
        "2026-11-23",
        """Drawn by a program from what the draws of sets 15b to 20c had left over and from fresh names, of owners that
begin with a digit or a to l, with some of what sets 20a to 20c had shown mended. Wrong are a loss that `map` divides
by the window's size (mended after this run) and `net.module()` called by mistake. Missed are a policy run by
`__call__` that keeps its graphs, a function of another file that runs the network it is given, beams that are trained
through, and a needless `retain_graph`.""",
    ),
    Round(
        "20c",
        "9bd8fee",
        "2026-11-23",
        """Drawn like set 20a by a third reader, of owners that begin with o to z. Missed is a window whose test is a
function of another file. No finding was wrong.""",
    ),
    Round(
        "20b",
        "9bd8fee",
        "2026-11-23",
        """Drawn like set 20a by another reader, of owners that begin with h to n. Wrong are an entropy whose row stood
a line off, and the branch `if self.training:` of an object that evaluates in the other. Missed are a function that
trains as `net.training` says, two forwards by a method of another file, and six attributes by which a network hands
out its results, debatable after rereading. The branch and the mode were mended after this run.""",
    ),
    Round(
        "20a",
        "9bd8fee",
        "2026-11-23",
        """Drawn by a program from what earlier draws had left over and from fresh names, from repositories that nobody
had seen, whose owners begin with a digit or a to g; one file of each at random. 26 of the 48 places of OOM201 are in
one file. Wrong is a window that calls another training loop. Missed are that one's tail, a network asked for by
`getattr`, samples that are only used without their graph, and a policy behind a method called `decision`.""",
    ),
    Round(
        "19d",
        "63bd345",
        "2026-11-22",
        """Drawn by a program from what the draws of sets 15b to 19c had left over, and labelled before the auditor ran,
with what those sets had shown mended. 11 of its repositories have another script in an earlier set, and its reader had
seen a list of places in set 19b. Missed are a function that trains or evaluates as its caller says, two forwards of a
meta-learner that differentiates in functions of its own, and a policy asked to evaluate actions, mended after this
run. No finding was wrong.""",
    ),
    Round(
        "19c",
        "03d415f",
        "2026-11-22",
        """Drawn like set 19a by a third reader, of owners that begin with o to z. The wrong ones are four places of one
style transfer whose frozen features run layer by layer, a method that saves weights, and a method of losses where the
forwards stand in it. Missed are those forwards, a script whose settings hold the device, and the solution of an
ordinary differential equation after its training. All but the last were mended after this run.""",
    ),
    Round(
        "19b",
        "03d415f",
        "2026-11-22",
        """Drawn like set 19a by another reader, of owners that begin with h to n. Wrong are networks that a loop over a
list freezes, numbers of tokens among the outputs of a network, and a script for the CPU; five places in a sanity test
of one batch were made debatable. Missed are a network known by such a loop, one whose forward hands a part of it on,
and a loss that is scaled although no autocast is in the file. The networks were mended after this run.""",
    ),
    Round(
        "19a",
        "03d415f",
        "2026-11-22",
        """Drawn by a program over 75 groups of subjects from repositories that nobody had seen, whose owners begin with
a to g or a digit; one file of each at random. Wrong are samples that a helper makes for both networks of a GAN, and a
loop over epochs that is taken for the one inside of it, which runs the backward alone. Missed are a tail that the next
epoch's `zero_grad` drops, and a forward behind a default that a starred argument may replace; both, and the samples,
were mended after this run. Six rows were made debatable.""",
    ),
    Round(
        "18c",
        "ce0ab3d",
        "2026-11-22",
        """Drawn like set 18a by a third reader, of owners that begin with o to z. Eight of the ten missed places are
in one CycleGAN whose backward runs on a name that nothing binds; they were made debatable. The others are a loss that
is a network of its own, and a forward whose loss is scaled although no autocast is in the file.""",
    ),
    Round(
        "18b",
        "ce0ab3d",
        "2026-11-22",
        """Drawn like set 18a by another reader, of owners that begin with h to n. Wrong are a clipping in the branch
for no scaler, a policy that runs no network, and a script whose `.numpy()` would fail on a GPU; missed are an average
of each epoch in a list that is returned, a trainer that says nothing of devices, a classifier on the device of a
tensor and a method that is asked to predict. The first and the first two missed were mended after this run. A VQGAN
loss in a validation was made debatable: it differentiates with regard to the last layer.""",
    ),
    Round(
        "18a",
        "ce0ab3d",
        "2026-11-22",
        """Drawn by a program over 73 groups of subjects from repositories that nobody had seen, whose owners begin
with a to g or a digit; one file of each at random. Missed are validation statistics of a training helper (four places
of one file), classes taken by `argmax().cpu().numpy()`, and the inner steps of `higher`; wrong are metrics among the
outputs of a network, a network that a helper froze, and a method that gives indices. All but the first and the inner
steps were mended after this run. Two forwards beside FSDP's MixedPrecision were made debatable.""",
    ),
    Round(
        "17",
        "4f1679e",
        "2026-11-22",
        """Drawn by a program over 88 groups of subjects from repositories that nobody had seen, when what sets 16a and
16b had shown was mended. Wrong is a smoke test on the CPU that prints of GPUs (four places), missed a renderer that is
called like a network, and samples of the last batch, which the script counts by itself. The first and the last were
mended after this run; no label was changed.""",
    ),
    Round(
        "16b",
        "73f411f",
        "2026-11-22",
        """Drawn by a program over many subjects from repositories that nobody had seen, whose owners begin with l to z
or a digit; one file of each at random. Twelve of the missed places of OOM202 are in one CycleGAN whose networks are
named `G__AB`, two in a function whose device is a parameter with the CPU for want of another, two in a class whose base
is in another file; those of OOM201 are an accuracy taken within training and a sample of its first round. All but one
were mended after this run. Made debatable are lists of the chunks of one batch, which no label spoke of.""",
    ),
    Round(
        "16a",
        "73f411f",
        "2026-11-22",
        """Drawn like set 16b by another reader, of owners that begin with a to k. Wrong are meters of another file in a
dictionary, missed a style transfer through parts cut out of a frozen network; both were mended after this run. Two
forwards of a unit test were made debatable, as such are in earlier sets.""",
    ),
    Round(
        "15b",
        "8a1ef06",
        "2026-11-22",
        """Drawn by a program over 39 subjects from repositories that nobody had seen (the pool of names typed off the
answers of look-ups), one file of each at random. Six of the missed places of OOM201 and OOM102 are in one file, which
keeps its best outputs with their graphs; wrong are an attack held under the name of another class's network, early
stopping of an encoder, an autocast switched off by a parameter and an adaptation inside a test. The first three were
mended after this run. Three labels were made debatable, as such places are in earlier sets: two in a step whose loop
is in another file, and the adaptation.""",
    ),
    Round(
        "14b",
        "9cca02b",
        "2026-11-22",
        """It was drawn like set 14a, by another reader and over other subjects: language, speech, time series,
recommendation, graphs, physics, reinforcement learning, tabular data. Missed are a test pass behind a loop that a
`raise` stops, a network named after its loss, losses that numpy reads and an action that its callers detach; wrong are
an action trained on through an array, a device read off a tensor and a loop over whole trainings. All of them were
mended after this run. One loop over the slices of a batch was made debatable, as such loops are in earlier sets.""",
    ),
    Round(
        "14a",
        "9cca02b",
        "2026-11-22",
        """It was drawn by a program from repositories that were listed for vision, generation and learning from little
data and had never been looked at, one file of each. Missed are parts of networks named by a letter, methods that make
arrays of a network's output and a copy of a network that adapts (MAML); wrong is a loop over the one phase `train`. All
of them were mended after this run.""",
    ),
    Round(
        "13b",
        "6bd5a19",
        "2026-11-22",
        """It was drawn like set 13a, by another reader and over other subjects: language, speech, time series,
recommendation, graphs, physics, reinforcement learning, tabular data. Six scripts hold nothing, and in them nothing was
reported. Nine of the missed places are trainers that no word puts on a GPU and whose networks other files make
(reported since); the others are a loop in a branch that a constant rules out, parts of networks run alone, and an
action that an imported helper makes an array of. The wrong findings are spectrograms, which have no weights. OOM101,
OOM103, OOM104 and OOM301 to OOM305 have no case in it.""",
    ),
    Round(
        "13a",
        "6bd5a19",
        "2026-11-22",
        """It was drawn by a program from repositories that were listed for vision, generation and learning from little
data and had never been looked at: of each, one file of 40 to 700 lines that holds a backward or calls a trainer,
whatever else it holds. Files without training code of their own and copies of known scripts were replaced. Six hold
nothing, and in them nothing was reported. The wrong findings are methods that reset a metric or grow a head, a network
frozen under the name of its file, a penalty on weights alone and a script that asks for a GPU and never uses it; missed
are networks in a list and outputs kept in one. All but the last two kinds were mended after this run. OOM103 and
OOM301 to OOM305 have no case in it.""",
    ),
    Round(
        "12d",
        "b7bd7ed",
        "2026-11-22",
        """It was drawn by a program from all files of 40 to 650 lines that hold a backward or call a trainer, one a
repository, after the auditor had been mended on sets 12a to 12c: no file was chosen by what it holds otherwise. The
repositories are those fetched for other sets; the files, and their names in the repository, are in none of these. Six
files without training code of their own were left out. Eight more hold nothing, and in them nothing was reported. The
wrong finding about OOM201 is a list that a class calls `data`, taken for the tensor without its graph (mended after
this run), and the training loop that is none hands each episode to a helper whose own loop trains. Missed are a part
of a network that is run alone, and a trainer that no word puts on a GPU. OOM103 and OOM104 have no certain case in it,
OOM101, OOM301, OOM303, OOM304 and OOM305 have one each.""",
    ),
    Round(
        "12c",
        "93b0279",
        "2026-11-22",
        """It was drawn and labelled like sets 12a and 12b, by a reader who knew neither, and measured after the auditor
had been mended on those two in part. 22 of its scripts come from new repositories, the others from repositories of 12a
and 12b, one further file of each. Ten hold nothing, and in them nothing was reported. Two of the wrong findings are one
network that is cut out of a frozen one, three are about OOM202 in scripts that no word puts on a GPU, two are numbers
taken for tensors, one is a pipeline of transformers and one a network frozen by a loop. Missed were sums in a
dictionary, a sum of what a function that is handed over returns, and an evaluation in a script that only evaluates. All
but two places were mended after this run. OOM104, OOM301 and OOM303 to OOM305 have no certain case in it.""",
    ),
    Round(
        "12b",
        "9fa2e44",
        "2026-11-22",
        """It was drawn for OOM201 like sets 10 to 11: one file a repository, unseen, that evaluates or generates by
what it holds, found by the topic in the name (language, speech, recommenders, graphs, time series, finance, molecules,
agents, few-shot, federated and continual learning, captioning, retrieval). The reader saw other files of a repository
where these decide what a method does. Six labels about such methods of imported classes, and about one without a caller
in sight, were made debatable as in all earlier sets, since the script does not tell. Four of the wrong findings are one
training loop whose backward is out of sight, five are lists of tags taken for tensors, and two places are one forward
that was reported at its outer call. Thirteen scripts hold nothing, and in them nothing was reported. OOM103 and OOM301
to OOM305 have no certain case in it.""",
    ),
    Round(
        "12a",
        "9fa2e44",
        "2026-11-22",
        """It was drawn like set 12b, by another reader, from repositories about pictures (classification, medical
imaging, re-identification, super resolution, autoencoders, diffusion, point clouds, anomalies, distillation,
adversarial examples). Six notebooks that were drawn too are left out of the sheet, because their labels count lines of
the raw file; read cell by cell, none of their findings was wrong and none was missed. Nine scripts hold nothing, and in
them nothing was reported. The two wrong findings are one sum that begins anew in each batch. OOM102, OOM301, OOM304,
OOM305, OOM401 and OOM501 have no certain case in it.""",
    ),
    Round(
        "11",
        "2bb5603",
        "2026-11-22",
        """It was drawn for OOM201 like set 10, after the auditor had been mended on sets 10 and 10b: one file a
repository, unseen, found by the topic in its name (transformers, pose, captioning, autoencoders, super resolution,
agents, emotion, adversarial examples, style transfer, continual learning, diffusion, depth, recurrent networks, faces,
classification, questions about images, graphs). 20 of the 71 are of repositories that the draws for sets 9 and 10 had
left over. Thirteen more hold nothing, and in them nothing was reported. Three of the four wrong findings about OOM201
are methods of a network that are called for what they do (heads added, batch normalisation stopped) or that give what
was computed before; the fourth and the miss are one place, two lines that both could be meant. All that was wrong or
missed was mended after this run. OOM101, OOM102 and OOM501 have one certain case in it, OOM103, OOM104, OOM301 to
OOM305 and OOM401 have none.""",
    ),
    Round(
        "10b",
        "5a4f4c8",
        "2026-11-21",
        """Evaluations that run with gradients (OOM201) are rare in set 10, so the draw was made larger: these are the
scripts that it had left over and those of two more draws made alike, labelled before the run as set 10 was. Twelve of
them hold nothing and two are no Python 3. Six of the thirteen wrong findings are functions: those that a hub returns
beside a network, taken for networks, and one that a step and an engine of an evaluation without gradients share.
OOM102 has one certain case in it, OOM103, OOM104, OOM301 to OOM305 and OOM501 have none.""",
    ),
    Round(
        "10",
        "5a4f4c8",
        "2026-11-21",
        """It was drawn for one rule, OOM201: files of 40 to 900 lines that evaluate or generate by what they hold,
three quarters with a backward and a quarter without one, each drawn at random of a repository drawn at random among
those found by the topic in their name, unseen (vision from digits to optical flow and crowd counting, text, speech,
graphs, recommenders, agents, generators, metric and federated learning, pruning, differential equations); one near
copy of a known script left out. Twelve of them hold nothing, and in them nothing was reported. Four of the seven
misses are one star import that brings torch under another name. OOM102, OOM103 and OOM305 have one certain case in
it, OOM104, OOM301 to OOM304 and OOM501 have none.""",
    ),
    Round(
        "9c",
        "27d2d39",
        "2026-11-21",
        """They are drawn like those of set 9b, from the same lists of repositories, and were labelled after the
auditor had been mended on sets 9a and 9b. Four more hold nothing, and in them nothing was reported. The one wrong
finding is a slip of a label, two lines off; a further true place was found to be missing from the labels at the
second reading. Four scripts hold the misses: the agent of one is loaded whole or else made; a network is asked for
arrays, by no name that says so; a model calls itself as `self.__call__(x)`; one is trained by Lightning and run after
that. The first three were mended after this run. OOM103, OOM104, OOM303 to OOM305 and OOM401 have no certain case in
it, OOM301 and OOM501 have one.""",
    ),
    Round(
        "9b",
        "ee2c74b",
        "2026-11-21",
        """Each is one file drawn at random among those of 25 to 900 lines with a backward, a `trainer.train` or a
`trainer.fit`, of a repository drawn at random among those found by the topic in their name, unseen (text, language
models and their fine-tuning, speech and audio, reinforcement learning, diffusion, autoencoders and flows, graphs, time
series, recommenders, few-shot and semi-supervised learning, continual learning, physics-informed networks, tabular and
multi-modal data, tutorials, competitions); near copies of known scripts left out. Six more were drawn that hold
nothing, and in them nothing was reported. Three scripts hold all disagreements: a module whose own method evaluates,
reported at the call of the method, and whose list keeps losses; a mode held in a constant; a star import in a script
without a device. OOM101, OOM103, OOM104, OOM301 and OOM303 to OOM305 have no certain case in it, OOM302 and OOM501 have
one.""",
    ),
    Round(
        "9a",
        "821cbeb",
        "2026-11-21",
        """Each is one file drawn at random among those of 25 to 1,200 lines with a backward, a `trainer.train` or a
`trainer.fit`, of a repository drawn at random among those found by the topic in their name, unseen (classification,
segmentation, detection, GANs, super-resolution, self-supervised learning, distillation, adversarial training, radiance
fields, point clouds, medical images, video, pruning and quantisation, domain adaptation); copies of scripts of older
sets were drawn again. Six more were drawn that hold nothing, and in them nothing was reported. OOM101, OOM102, OOM104,
OOM301 to OOM304 have no certain case in it, OOM305 and OOM501 have one.""",
    ),
    Round(
        "7b",
        "bfca5e3",
        "2026-11-21",
        """They were found with those of set 7, and left out of it by a draw by owner before any was run; labelled with
them, measured after the auditor had been mended on set 7 and only measured: nothing has been mended on them. The one
disagreement is a slip of a label, on the first line of a statement whose call is on the second. They are few: OOM101
has two cases, OOM102 one, OOM104 none.""",
    ),
    Round(
        "8b",
        "d5ff771",
        "2026-11-21",
        """They are what the text search for set 8 had found and set 8 had left over, from repositories that no other
set has, labelled after the auditor had been mended on set 8. Most are near misses. Six more hold nothing, and in them
nothing was reported. Three causes stand behind the six wrong findings: the device of a script is set to the CPU after
one of CUDA was, and `torch.cuda` is still called (three times); autocast and DeepSpeed that come by ways not
recognised (twice); a loop over checkpoints, each tried on one batch, taken for one over batches. They were mended
after this run.""",
    ),
    Round(
        "8",
        "2ff1664",
        "2026-11-21",
        """They were chosen by text search for the findings about a step and for what looks like them: retained
graphs that are needed and not needed, gradient accumulation with and without a division and a tail, clips under a
scaler, float16 without one, backwards inside autocast, caches emptied, gradients set to zero by hand. Some are older
revisions of their files, where the newest no longer holds what was searched for, and about twenty are other files of
repositories in which false alarms on these rules had been read before. Where they come from decides how often a
finding is there: the set says how often the auditor is right about it, not how common it is. What published scripts
rarely hold stayed rare (OOM301, OOM304, OOM305 and OOM501). Three places changed after scoring: the acting loop of
dongminlee94/deep_rl's vpg.py trains, by a helper whose backward of the policy is in no loop of its own; the second
forward of a loop that trains in float16 without a scaler is the same fault once more; a loop over the micro-batches
that one call of the model gives is debatable, as it is in a script of an older set that is written alike. Two more
scripts were taken that hold nothing and in which nothing was reported.""",
    ),
    Round(
        "7",
        "8a83761",
        "2026-11-21",
        """They were chosen for the two findings that published scripts rarely hold, kept graphs and retained graphs,
and for how they are nearly held: repositories found by the topic in their name (recurrent networks and character
models, sequence to sequence, chatbots, DRQN and A3C, autoencoders, GANs, digits, homework, siamese networks, music),
files in them by text search for sums and lists of losses, graphs that are kept on purpose, states carried from step to
step, and forwards that nothing trains through. OOM104 has no certain case in it once more: the states that are chained
without a detach are those of acting loops and of text that is generated, where the cause is the gradients that are on
(OOM201). One label, an optimizer in a branch that no call in its file takes, turned out debatable.""",
    ),
    Round(
        "6",
        "4ae7a3c",
        "2026-11-21",
        """Each is one file drawn at random among those of 25 to 650 lines with a backward, a `trainer.train` or a
`trainer.fit`, of a repository picked from search results by the topic in its name, unseen (classification,
segmentation, detection, GANs, speech, reinforcement learning, diffusion, contrastive learning, distillation, graphs,
time series, fine-tuning, autoencoders, recommenders, meta learning, semi-supervised learning, competitions).
Seven more were drawn that hold nothing and in which nothing was reported. The script of rmdluo/pytorch-gan is in the
syntax of Python 3.12: the Python 3.11 of this run cannot parse it, which the auditor says, and its 9 findings and 2
loops count as missed. After this run the auditor learned to read such f-strings on older Pythons, and that the loss
of a prediction is no evaluation; nothing else was mended on this set. OOM102, OOM104, OOM304 and OOM501 have no
certain case in the set, and OOM101, OOM103, OOM301, OOM302, OOM303 and OOM305 have one each.""",
    ),
    Round(
        "5",
        "b05f8d0",
        "2026-11-21",
        """91 of them were drawn at random, one or two files a repository, from repositories found by the topic in
their name (autoencoders, GANs, recurrent networks, reinforcement learning, captioning, radiance fields, style transfer,
contrastive learning, language models, diffusion, segmentation, competitions, meta learning, re-identification, domain
adaptation), 23 by text search in those and fifty more for what is rare. OOM104 has no certain case in it, and OOM101,
OOM102, OOM103, OOM302, OOM305 and OOM501 have one each: published scripts rarely hold them.""",
    ),
    Round(
        "4",
        "ab40d99",
        "2026-11-21",
        """84 of them were taken by the topic in the name of their repository (segmentation, detection, GANs, speech,
captioning, diffusion, contrastive learning, distillation, graphs, reinforcement learning, language models), 21 by text
search in repositories found that way for what is rare: retained graphs, sums and lists of losses, caches emptied.
OOM104 has no certain case in it, OOM101, OOM102, OOM301, OOM304 and OOM305 have one or two each.""",
    ),
    Round(
        "3",
        "89a5762",
        "2026-11-21",
        """They were chosen for what the sheet hardly covered then (kept graphs, retained graphs, recurrent
states, mixed precision without a scaler, accumulation windows), by topic and by text search. OOM104 and OOM304 have no
certain case in it: published scripts detach, repackage or renew their states, and train in float16 without a scaler
only where an option is set to it.""",
    ),
]


NEWEST = 6
"""So many of them are added up: enough for the rules that fire seldom to have several cases each."""


class Place(NamedTuple):
    """A row of first-run.tsv; a label is True for true, False for debatable and None where there is none."""

    mark: Mark
    found: bool
    frozen: bool | None
    corrected: bool | None


def read_places(round_name: str) -> Iterator[Place]:
    """The rows of first-run.tsv on the scripts of one set."""
    labels = {"true": True, "debatable": False, "none": None}
    listed = {(row["repo"], row["path"]) for row in _rows("scripts.tsv") if row["set"] == round_name}
    for row in _rows("first-run.tsv"):
        if (row["repo"], row["path"]) in listed:
            yield Place(
                Mark(row["repo"], row["path"], int(row["line"]), row["code"]),
                row["found"] == "yes",
                labels[row["frozen"]],
                labels[row["corrected"]],
            )


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (SHEET / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def scores_by(places: Sequence[Place], label: str) -> dict[str, Score]:
    """The scores by one of the two columns of labels, `frozen` or `corrected`."""
    found = [place.mark for place in places if place.found]
    labelled = [(place.mark, truth) for place in places if (truth := getattr(place, label)) is not None]
    return scores(judge(found, labelled))


def section(told: Round) -> str:
    """What the first run on one set came to, in Markdown."""
    places = list(read_places(told.name))
    scripts = {(place.mark.repo, place.mark.path) for place in places}
    changed = sum(place.frozen is not place.corrected for place in places)
    return f"""## Set {told.name}: oomfix at revision {told.revision}, {told.day}

{len(scripts)} scripts of {len({repo for repo, _ in scripts})} public repositories.
{told.choice}

By the frozen labels:

{score_table(scores_by(places, "frozen"))}

By the labels after every disagreement had been read again, {changed} of {len(places)} places changed:

{score_table(scores_by(places, "corrected"))}
"""


def together(newest: Sequence[Round]) -> str:
    """What the first runs on several sets came to, in Markdown: rules that are rare have few places in each."""
    places = [place for told in newest for place in read_places(told.name)]
    scripts = {(place.mark.repo, place.mark.path) for place in places}
    return f"""## The newest sets together: {", ".join(told.name for told in newest)}

{len(scripts)} scripts. By the frozen labels:

{score_table(scores_by(places, "frozen"))}

By the labels after every disagreement had been read again:

{score_table(scores_by(places, "corrected"))}
"""


def main() -> None:
    """Write the result."""
    sections = "\n".join(map(section, ROUNDS))
    RESULT.write_text(
        f"""# The auditor on scripts it had never seen

`python -m bench.first_run` on the rows of bench/corpus/first-run.tsv, CPU only.

Each set was labelled by reading, and the labels were frozen before the auditor ran on any of its scripts. Sets 3 to 5,
7, 8, 8b and 9a to 37a have been used to develop the rules since: bench/results/audit-corpus.md says what the
current version makes of all of them, and is no blind figure.

{together(ROUNDS[:NEWEST])}
{sections}""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
