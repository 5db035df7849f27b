"""What is known about torch's own functions and about the libraries around it, by qualified name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from oomfix.script.facts.values import Kind, Value
from oomfix.script.syntax.names import MANY_NAMES, last_of
from oomfix.script.syntax.patterns import Pattern

INTEGER_RESULTS = frozenset(
    "argmax argmin eq ne gt ge lt le equal allclose isnan isinf isfinite isclose long int short byte bool char numel "
    "size dim ndimension nonzero bincount histc argsort logical_and logical_or logical_not logical_xor bernoulli "
    "multinomial any all count_nonzero searchsorted randint arange is_tensor".split()
)
"""Functions and methods of tensors whose result carries no graph whatever goes in."""

LEAVING_THE_GRAPH = frozenset(
    "item detach tolist numpy data clone_detached detach_ asnumpy to_numpy stop_gradient zeros_like ones_like "
    "empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_tensor new_full new_empty "
    "element_size get_device type data_ptr storage_offset is_cuda".split()
)
"""Methods and functions whose result holds no graph: values copied out, or fresh tensors."""

INTEGER_DTYPES = frozenset(
    f"torch.{dtype}"
    for dtype in "int8 uint8 int16 short int32 int int64 long bool uint16 uint32 uint64 LongTensor IntTensor "
    "ByteTensor BoolTensor ShortTensor cuda.LongTensor cuda.IntTensor cuda.ByteTensor cuda.BoolTensor".split()
)
"""Tensors of these carry no graph."""

FRESH = frozenset("zeros ones empty rand randn zeros_like ones_like empty_like".split())
"""Constructors of a tensor of floats, into which a value may be written in place, graph and all."""

PLAIN_ATTRIBUTES = frozenset(
    "shape device dtype ndim requires_grad is_leaf is_cuda data grad grad_fn layout itemsize nbytes".split()
)

INDEX_REDUCTIONS = frozenset("max min topk sort kthvalue median mode cummax cummin".split())
"""With a dimension they give `(values, indices)`; the indices carry no graph."""

NUMBER_BUILTINS = frozenset(
    "float int bool str len repr format isinstance issubclass hasattr callable id hash ord chr print range open type "
    "input divmod bytes ascii hex oct bin".split()
)
PASSING_BUILTINS = frozenset("list tuple iter reversed sorted next set frozenset zip enumerate map filter dict".split())
REDUCING_BUILTINS = frozenset("sum max min abs round pow".split())

PLAIN_PACKAGES = frozenset(
    "numpy math random os sys time json re logging pandas sklearn scipy collections itertools datetime shutil pickle "
    "argparse glob copyreg string csv yaml cv2 PIL matplotlib warnings pathlib statistics typing psutil gc io "
    "subprocess tensorboardX wandb mlflow seaborn skimage nibabel soundfile librosa nltk jieba tqdm.write".split()
)
"""Packages whose functions return nothing that carries an autograd graph."""

MODEL_PACKAGES = frozenset("dlib mediapipe spacy".split())
"""Packages that make models of their own, which record no autograd graph."""

_TRANSFORM = Pattern(
    r"^((torchvision|torchaudio|torchio|monai)\.transforms|kornia\.augmentation)\.(\w+\.)*[A-Z]|(^|\.)\w*(Spectrogram|MFCC)$"
)
_PIPELINE = Pattern(r"(^|\.)\w*Pipeline\.from_\w+$|^diffusers\.(\w+\.)*\w*Pipeline$|^transformers\.pipeline$")
"""Pipelines from a network's hub, which turn gradients off by themselves."""
_DETECTOR = Pattern(
    r"^ultralytics\.(\w+\.)*(YOLO\w*|RTDETR|SAM|FastSAM|NAS)$|^yolov5\.load$|^facenet_pytorch\.(\w+\.)*MTCNN$"
)
"""Detectors that turn gradients off by themselves."""
_LOSS_CLASS = Pattern(r"(Loss|Criterion)\w{0,6}$|^Loss|^Criterion|^LabelSmooth")
_LOSSES_ELSEWHERE = "gpytorch.mlls."
_OPTIMIZER_CLASS = Pattern(
    r"^(torch\.optim\.(?!lr_scheduler|swa_utils)\w+|.*\b(Adam\w*|AdamW\w*|SGD|RMSprop|Adagrad|Adafactor|Lamb|LAMB|RAdam|Lion|"
    r"\w*Optimizer|BertAdam|AdaBelief|SAM|NoamOpt|ScheduledOptim|MADGRAD|Ranger))$"
)
_MODULE_FACTORY = Pattern(
    r"^torchvision\.models\.(?!\S*Weights\b)|^timm\.create_model$|^timm\.models\.|^torch\.(hub|jit)\.load$|^segmentation_models_pytorch\.[A-Z]|"
    r"^transformers\.(?!\w*(Tokenizer|Processor|Config|Extractor|Dataset|Collator))\w+\.(from_pretrained|from_config)$|"
    r"^(transformers|pytorch_transformers|pytorch_pretrained_bert|diffusers|peft)\.\w*(Model|For[A-Z]\w+|Net|UNet\w+|VAE|Autoencoder\w*)"
    r"(\.from_pretrained|\.from_config)?$|"
    r"^sentence_transformers\.\w*(Transformer|Encoder)$|"
    r"^(open_)?clip\.load$|^efficientnet_pytorch\.\w+\.(from_pretrained|from_name)$|^peft\.get_peft_model$"
)
_WRAPPER = Pattern(
    r"^(torch\.nn\.DataParallel|torch\.nn\.parallel\.(\w+\.)?(DataParallel|DistributedDataParallel)|torch\.compile|torch\.jit\.(?!load)\w+|"
    r"torch\.nn\.SyncBatchNorm\.convert_sync_batchnorm|apex\.parallel\.\w+|copy\.deepcopy|torch\.optim\.swa_utils\.AveragedModel|"
    r"torch\.distributed\.fsdp\.\w+|torch\.nn\.utils\.(parametrizations\.)?(spectral_norm|weight_norm)|.*\b(DDP|FSDP|DataParallel\w*|ModelEMA))$"
)
_ACCELERATOR = Pattern(
    r"^(accelerate\.Accelerator|(lightning\.)?(fabric\.)?Fabric|lightning\.Fabric|lightning_fabric\.Fabric)$"
)
_TRAINER = Pattern(
    r"^((pytorch_lightning|lightning|lightning\.pytorch)\.(trainer\.)?(trainer\.)?Trainer|(transformers|trl)\.\w*Trainer)$"
)
_PARAMETERLESS = frozenset(
    "CosineSimilarity PairwiseDistance Softmax Softmax2d Softmin LogSoftmax Sigmoid LogSigmoid Hardsigmoid ReLU ReLU6 "
    "RReLU LeakyReLU ELU CELU SELU GELU GLU SiLU Mish Hardswish Tanh Hardtanh Tanhshrink Softplus Softsign Softshrink "
    "Hardshrink Threshold Dropout Dropout1d Dropout2d Dropout3d AlphaDropout Flatten Unflatten Upsample "
    "UpsamplingNearest2d UpsamplingBilinear2d MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d "
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d Identity ZeroPad2d "
    "ConstantPad2d ReflectionPad1d ReflectionPad2d ReplicationPad2d Unfold Fold PixelShuffle PixelUnshuffle".split()
)
"""Modules that only compute on what they are given: a call is no forward of a network."""
_COMPARING = frozenset({"CosineSimilarity", "PairwiseDistance"})
"""What computes on two outputs alone, wherever it comes from."""
_PLAIN_NN = frozenset(
    {"Parameter", "ParameterList", "ParameterDict", "utils", "init", "functional", "parallel", "Buffer"}
)
CONTAINERS = frozenset({"torch.nn.ModuleList", "torch.nn.Sequential", "torch.nn.ModuleDict"})
BOOKKEEPING = frozenset(
    "parameters append add_ named_parameters modules named_modules children named_children buffers "
    "named_buffers state_dict "
    "load_state_dict register_buffer register_parameter register_forward_hook add_module get_parameter zero_grad "
    "save_pretrained save resize_token_embeddings get_parameter_groups no_sync gradient_checkpointing_enable "
    "register_full_backward_hook register_backward_hook initialize init_weights set_input train_mode "
    "print_trainable_parameters "
    "set_grad_checkpointing enable_input_require_grads load num_parameters get_input_embeddings init_hidden "
    "initHidden reset_parameters update_learning_rate get_config tie_weights freeze unfreeze summary".split()
)
"""Methods of modules that run nothing."""
_BOOKKEEPING_BEGINS = ("set_", "register_", "load_", "save_", "init_")
DETACHED_OUTPUTS = frozenset({"mems", "new_mems"})
"""What the outputs of Transformer-XL and XLNet carry into the next segment: their models detach it themselves."""
SEVERAL = frozenset("split chunk unbind tensor_split hsplit vsplit meshgrid broadcast_tensors where".split())
"""Functions and methods that give several tensors."""
REDUCTIONS = frozenset("mean sum prod var std norm".split())
"""Methods that only tensors have, as results are used here."""
ACTIVATIONS = frozenset("softmax log_softmax sigmoid tanh relu masked_fill squeeze unsqueeze".split())
"""More methods that only tensors have; each gives one tensor."""
COPIES = frozenset("tensor Tensor FloatTensor LongTensor DoubleTensor IntTensor from_numpy".split())
"""Constructors that copy numbers out of whatever they are given."""
DISTRIBUTION = "torch.distributions"
"""Stands behind an object of a distribution that torch has: `sample` of it turns gradients off."""
DRAWN = "torch.normal"
"""Stands behind what it draws: a backward reaches the mean and the deviation, with gradients of zero for both."""
PACKED = "torch.nn.utils.rnn.PackedSequence"
"""Stands behind a packed batch of sequences, whose `data` is the tensor itself."""
PACKING = frozenset({"pack_padded_sequence", "pack_sequence"})
DIFFERENTIABLE_OPTIMIZER = "higher.optim"
"""Stands behind an optimizer whose steps are differentiated through; `step` is given a loss."""
TORCH_GRAPH_FREE = frozenset(
    "zeros ones empty full rand randn randint randperm arange linspace tensor from_numpy as_tensor eye manual_seed "
    "device save is_tensor Generator Size finfo iinfo LongTensor FloatTensor Tensor IntTensor BoolTensor "
    "DoubleTensor zeros_like ones_like get_rng_state set_rng_state no_grad normal".split()
)

SCALERS = (
    "torch.cuda.amp.GradScaler",
    "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler",
)
BACKWARD_HOOKS = (
    "register_backward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_hook",
)
"""Methods of modules, and of tensors, that hand their gradients to a function."""
OTHER_LIBRARIES = frozenset("tinygrad jittor paddle mindspore oneflow megengine mxnet chainer".split())
"""Libraries that are written like torch."""
ADDING_UP = frozenset("stack cat concat concatenate hstack vstack sum mean".split())
"""Functions whose result is divided by whatever all that they are given was divided by."""

SUMMED = 'reduction="sum"'
"""Stands among the divisors of a loss that is the sum over its samples."""


@lru_cache(MANY_NAMES)
def kind_of_call(qualified: str) -> Kind | None:
    """What calling an imported name gives: an optimizer, a module, a criterion...; None when nothing is known."""
    if qualified in SCALERS:
        return Kind.SCALER
    if qualified.startswith("torch.nn."):
        rest = qualified[len("torch.nn.") :]
        if rest.split(".")[0] in _PLAIN_NN:
            return None
        if rest.startswith("modules."):
            rest = last_of(rest)
        return Kind.LOSS if _LOSS_CLASS.search(rest) or rest in _PARAMETERLESS else Kind.MODULE
    if qualified.startswith(_LOSSES_ELSEWHERE):
        return Kind.LOSS
    if _OPTIMIZER_CLASS.match(qualified):
        return Kind.OPTIMIZER
    if _ACCELERATOR.match(qualified):
        return Kind.ACCELERATOR
    if qualified == "oomfix.runtime.preset":
        return Kind.MEMORY
    if _MODULE_FACTORY.match(qualified):
        return Kind.MODULE
    last = last_of(qualified)
    if last in _COMPARING or (last[:1].isupper() and _LOSS_CLASS.search(last) and not re.match(r"Model|Net", last)):
        return Kind.LOSS
    return None


@lru_cache(MANY_NAMES)
def has_no_weights(qualified: str) -> bool:
    """Whether a call makes what computes without weights of its own, and records a graph only of what goes in."""
    package = qualified.split(".")[0]
    known = (_PIPELINE, _TRANSFORM, _DETECTOR)
    return package in MODEL_PACKAGES or any(kind.search(qualified) for kind in known)


@lru_cache(MANY_NAMES)
def is_trainer(qualified: str) -> bool:
    """Whether a call makes an object that runs the training loop itself."""
    return bool(_TRAINER.match(qualified))


def holds_networks(value: Value) -> bool:
    """Whether a value is `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict`, whose parts are networks as well."""
    made_by = value.ref[0] if value.kind is Kind.MODULE and isinstance(value.ref, tuple) else None
    return made_by in CONTAINERS


def summed_by(keywords: Mapping[str, Value]) -> frozenset[str]:
    """What `Value.divisors` has of a loss that is made or computed with these arguments: `SUMMED`, or nothing."""
    reduction, average = keywords.get("reduction"), keywords.get("size_average")
    summed = (reduction is not None and reduction.constant == "sum") or (
        average is not None and average.constant is False
    )
    return frozenset({SUMMED}) if summed else frozenset()


def runs_module(name: str) -> bool:
    """Whether a function, by its last name, runs the network that is its first argument on the others."""
    return name in ("data_parallel", "functional_call")


def solves_equation_of(name: str) -> bool:
    """Whether a function, by its last name, integrates the network that is its first argument (torchdiffeq)."""
    return name in ("odeint", "odeint_adjoint")


def is_functional_transform(qualified: str) -> bool:
    """Whether a function of functorch, now in `torch.func`, differentiates the function that it is given."""
    package, _, name = qualified.partition(".")
    return package == "functorch" and name in ("grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jvp", "vjp")


def runs_what_it_is_given(qualified: str) -> bool:
    """Whether a function calls its first argument, a network or a function, with the others."""
    return qualified == "torch.utils.checkpoint.checkpoint"


@lru_cache(MANY_NAMES)
def wraps_module(qualified: str) -> bool:
    """Whether a call returns the module it is given, wrapped or copied."""
    return bool(_WRAPPER.match(qualified))


def is_plain(qualified: str) -> bool:
    """Whether everything a package's functions return is free of autograd graphs."""
    return qualified.split(".")[0] in PLAIN_PACKAGES


def runs_nothing(method: str) -> bool:
    """Whether a method of a module only keeps books, by its name: `state_dict`, `save_weights`, `train_loader`."""
    return method in BOOKKEEPING or method.startswith(_BOOKKEEPING_BEGINS) or method.endswith("loader")
