"""What a name says by itself, where nothing in sight says what it is bound to.

The last thing that is asked: what a name is bound to, and how it is used (`hints`), come first.
"""

from __future__ import annotations

import re
from functools import lru_cache

from oomfix.script.syntax.names import MANY_NAMES, last_of
from oomfix.script.syntax.patterns import Pattern

_MODULE_NAME = Pattern(
    r"(^|_)(model|net|network|net_?[a-z]|encoder|decoder|generator|discriminator|backbone|critic|actor|policy|"
    r"classifier|transformer|unet|vae|gan|bert|gpt|resnet|cnn|rnn|lstm|gru|mlp|autoencoder|student|teacher|extractor|"
    r"embedder|predictor|segmentor|detector|denoiser|estimator|regressor|vit|clip|vgg|inception|(?<=_)head)\d*(_?[a-z0-9]{1,3})?$"
    r"|^net(?-i:[A-Z])\w*$|\w(Net|Model|(?<!Data)Module)$|(^|_)(enc|dec)(_?\d+)?$|(^|_)module_[a-z0-9]$"
    r"|(?-i:[a-z](Network|Critic|Actor|Encoder|Decoder|Discriminator|Policy|Classifier|Backbone))$"
    r"|^(gen|disc?)_(?-i:[a-z]|[A-Z]{1,2}(2[A-Z])?)$",
    re.IGNORECASE,
)
_PART_NAME = Pattern(
    r"^(pi|mu|phi|psi|logvar|logsigma|[fgqv]|fc|conv|linear|lin|layer|block|stage|stem|proj|projection|projector|head|"
    r"neck|embedding|attention|attn|bottleneck|features|(fc|conv|linear|proj)_(out|in|mu|mean|(log)?_?(var|sigma|std))|"
    r"\w+_(fc|conv|linear|layer|block|head|proj|projection|projector|embedding|attention|attn))_?\d*$"
)
_LETTER_PART_NAME = Pattern(r"^[A-Z][a-z]?_?\d*$")
_FORWARD_METHOD = Pattern(
    r"^(forward|encode|decode|extract|embed|project|classify|predict(?!\w*_from_)|pred_|segment(ation)?$|infer|elbo|llm|"
    r"head|backbone)|"
    r"(features?|logits?|loss|^p_losses|embeddings?|likelihood|(^|_)nll|log_?prob|(^|_)q_?values?|"
    r"^get_(\w+_and_)?values?)$",
    re.IGNORECASE,
)
_LIKELIHOOD = Pattern(r"(loss|likelihood|(^|_)nll|log_?probs?)$", re.IGNORECASE)
_CHANCE = Pattern(r"(^|_)(entrop(y|ies)|(act(ion)?s?_)?(probs?|probability|probabilities))$", re.IGNORECASE)
_GIVES_GRADIENTS = Pattern(r"(^|_)grad(s|ients?)?$", re.IGNORECASE)
_GIVES_INTEGERS = Pattern(r"_(ids|indices|index|idx|lengths|masks?|labels)$", re.IGNORECASE)
_RUNNING_METHOD = Pattern(
    r"^(encode|decode|embed|encode_image|encode_text|evaluate_actions|extract_features?|logits?|"
    r"mapping|synthesis|classify|reconstruct|"
    r"get_(?!input_|output_)(\w+_)?(features?|embeddings?|logits|representations?)|"
    r"(?!pre_|post_)\w+_forward|forward_(?!np$|pre_hook|hook|test$|infer|generate|predict|sample)\w+)$"
)
"""Of the networks of public training code, one in thirty turns gradients off in a method of one of these names."""
_TRAINING_VERB = Pattern(
    r"(^|_)(learn|train|optimi[sz]e|fit|backward|finish|adapt|improve|fine_?tune|reinforce|update)(_|$)"
)
_DIFFERENTIATING = Pattern(
    r"attack|perturb|adversar|deepfool|saliency|grad_?cam|derivative|jacobian|hessian|(^|[._])(atk|pgd|fgsm|bim|cw)(_|$)|\.(attribute|explain)$",
    re.IGNORECASE,
)
_DETACHING = Pattern(r"detach|repackage|stop_?grad|truncate_?graph|(to|2|as)_?(np|numpy|ndarray)(_|$)", re.IGNORECASE)
_LOGGING = Pattern(
    r"log|print|write|show|plot|save|dump|record|report|display|scalar|meter|metric|bar|summary|wandb|track|vis|stat|acc",
    re.IGNORECASE,
)
_THAWING = Pattern(r"(^|_)(un_?freeze|thaw)", re.IGNORECASE)
_SAVING = Pattern(r"early_?stop|(^|_)save_\w*(model|net|state|weights|best)|check_?point(er|ing)?$", re.IGNORECASE)
_METRIC = Pattern(
    r"(?<!para|volu)(?<!geo|sym|bio|iso)met(ric|er)|evaluator|logger|accuracy|confusion|perplexity|"
    r"(^|_)(acc|auc|auroc|fid|iou|miou|map|mrr|psnr|ssim|top_?[15])(_|$)",
    re.IGNORECASE,
)
_RECORD = Pattern(
    r"(^|_)(dict|logs?|stats?|info|details|corrects?|counts?|hits)$|^(num|count|correct)_|_(tokens|words|lengths)$|"
    r"^n_(correct|right|valid|hits|samples)$|^(right|wrong|true|total)$",
    re.IGNORECASE,
)
_LETTER_MODULE_NAME = Pattern(r"^([DGE]_{0,2}[A-Z0-9]{0,3}|net[DGE])$")
"""`D`, `G_A`, `netD`: the letters of adversarial training."""
_MODE = Pattern(
    r"_*(is_?)?(train(ing)?|eval(uat(ing|ion))?|test(ing)?|infer(ence|ring)?|learning)_?(mode|phase|flag)?$",
    re.IGNORECASE,
)
_DISCRIMINATOR = Pattern(r"(^|_)(?i:discr?|discriminator)(_?[A-Za-z0-9]{1,3})?$|^(dis_|netD|D)_{0,2}[A-Z0-9]{0,3}$")
_AUTOENCODER = Pattern(r"(^|_)(auto_?encoder|(vq_?)?vae|vqgan)\d*$", re.IGNORECASE)
_ONE_WAY = Pattern(r"(?<!auto)(?<!auto_)(en|de)c(oder)?\d*$", re.IGNORECASE)
_PENALTY = Pattern(r"sparsity|orthogonal|regulari[sz]|weight_?decay|(^|_)(reg|l[12]|penalty)(_|$)", re.IGNORECASE)
_ADAPTING = Pattern(r"(^|_)(maml|anil|reptile|meta_?(learner|sgd))", re.IGNORECASE)
_AVERAGE_NAME = Pattern(r"^[GgDd]_?(ema|EMA|avg)$")
_VERB = Pattern(
    r"^(\w+_(?=(build|create|load|save|make|reset)_))?"
    r"(save|load|get|build|create|make|init|initialize|train|test|eval|evaluate|update|set|prepare|define|print|count|"
    r"freeze|unfreeze|reset|setup|fit|run|write|log|show|plot|add|apply|export|restore|resume|validate|sync|average|"
    r"grow|shrink|select|choose|new|copy|convert|register|compile|summarize|clip|clamp|weights?|compute|calculate|calc|"
    r"wrap|unwrap|configure|validation|training|on|clone|move|merge|fuse|prune|quantize|shard|consolidate|push|upload|"
    r"download|fetch|import|find|remove|delete|replace|patch|check|is|has|describe|adapt|construct|compare|inspect|"
    r"sample|generate|exec|pretrain|fine_?tune|append|insert|pop|store|dump|unload|watch|serialize|instantiate|"
    r"broadcast|draw|visuali[sz]e|display|report|examine|analy[sz]e|explain|profile|benchmark|measure|parse|read|call|"
    r"debug|deploy|launch|dispatch)"
    r"(_|$|(?-i:[A-Z]))",
    re.IGNORECASE,
)
_NO_NETWORK_NAME = Pattern(
    r"early_?stop|tokeni[sz]er|spacy|(one_?hot|label|ordinal)_?encoder$|(batch|data|label|target)_?extractor$|"
    r"(\w+_)?(batch|data|task|episode|train|test|valid|val)_?(generator|gen)$|"
    r"(num|nb)_\w+$|n_\w+s$|(\w+_)?(greedy|beam|ctc)_?(ctc_?)?decoder$|"
    r"(ewc|ema|ece|eer|emd|elbo|dcg|gae|dct|dft|dwt|dtw|elu|gelu|glu|critical)$",
    re.IGNORECASE,
)
_CONVERTER = Pattern(r"(^|_)(convert(er)?|codec|tokeni[sz]er|vocab|alphabet)$", re.IGNORECASE)
_DATA = Pattern(r"(^|_)(data|train(ing)?|val|valid(ation)?|test|eval)_?(loader|set)$", re.IGNORECASE)
_LOSS_NAME = Pattern(r"loss|criterion|^crit(_|$)", re.IGNORECASE)
_NETWORK_WITH_LOSS = Pattern(
    r"loss_?(model|net|network)\d*$|(model|net|network)_(with|and)_loss$|loss_?pred\w*$", re.IGNORECASE
)
_LOSS_ABBREVIATION = Pattern(r"(bce|mse|ce|nll|l1|kld?|ctc|(ms_?)?ssim)$", re.IGNORECASE)
_WEIGHT_NAME = Pattern(r"(weight\w*|coeff?\w*|scale|factor|ratio|lambda|alpha|beta|gamma)$", re.IGNORECASE)
_OPTIMIZER_NAME = Pattern(
    r"(^|_)(opt[a-z]?|optim\w*|opt_\w+)\d*$|_opt$|\w[Oo]ptimi[sz]er$",
    re.IGNORECASE,
)
_STATE_NAME = Pattern(
    r"(^|_)(h|c|hx|cx|hn|cn|h_?[0tn]|c_?[0tn]|hc|hidden\w*|state\w*|hiddens|states|memory|mems?|past\w*|cache)(_|\d|$)",
    re.IGNORECASE,
)
_ENCODING_NAME = Pattern(r"pos(ition(al)?)?_?enc|(fourier|freq(uency)?|sinus\w*)_?(enc|feat)", re.IGNORECASE)
_SAMPLING = Pattern(r"(^|_)sampl(e|er|ing)(_|$)", re.IGNORECASE)
_NOISING = Pattern(r"(^|_)\w*(diffuser|diffusion|noiser|noise_?(scheduler|process))$", re.IGNORECASE)
_SCALER_NAME = Pattern(r"scaler", re.IGNORECASE)


def _last(path: str) -> str:
    """`heads` of `self.heads[0]`."""
    return last_of(path).split("[", 1)[0]


@lru_cache(MANY_NAMES)
def looks_like_module(name: str) -> bool:
    """Whether a called name is usually a network, by its last component."""
    last = _last(name)
    if name.endswith("']") and _is_entry_of_network(name):
        return True
    if looks_like_loss(last) or _VERB.match(last.lstrip("_")) or _NO_NETWORK_NAME.match(last.lstrip("_")):
        return False
    holder = _last(name.rpartition(".")[0])
    if looks_like_loss(holder) or _CONVERTER.search(holder) or _DATA.search(holder):
        return False  # `loss.generator(validity)` and `converter.encoder(text)` are named after what they are for
    if _LETTER_MODULE_NAME.match(last) or is_average_of_network(last):
        return True
    return len(last) > 2 and bool(_MODULE_NAME.search(last))


def is_named_by_a_verb(path: str) -> bool:
    """Whether the last name of a path says what is done, as `get_symbol` does, and not what it is."""
    return bool(_VERB.match(last_of(path).lstrip("_")))


def is_average_of_network(name: str) -> bool:
    """`G_ema`, `g_ema`: the running average of a network that is named by a letter."""
    return bool(_AVERAGE_NAME.match(name))


def _is_entry_of_network(path: str) -> bool:
    """`parts["model"]`: what a dict that is not one of losses or optimizers holds under the name of a network."""
    holder, _, key = path[:-2].rpartition("['")
    return not looks_like_loss(holder) and not looks_like_optimizer(holder) and looks_like_module(key)


def says_mode(name: str) -> bool:
    """Whether a flag says by its name whether an object trains: `self.is_training`, `self.eval_mode`."""
    return bool(_MODE.match(name))


def looks_like_discriminator(path: str) -> bool:
    """Whether a network is named like one that tells samples apart: `self.disc_A`, `netD`."""
    return bool(_DISCRIMINATOR.search(_last(path)))


def looks_like_autoencoder(path: str) -> bool:
    """Whether a name says of a network that it encodes and decodes."""
    return bool(_AUTOENCODER.search(_last(path)))


def runs_one_way(path: str) -> bool:
    """Whether a network is named like one half of an autoencoder: `text_encoder`."""
    return bool(_ONE_WAY.search(_last(path)))


def adapts_as_it_runs(path: str) -> bool:
    """Whether a network is named after a way of learning to learn: it trains a copy of itself wherever it runs."""
    return bool(_ADAPTING.search(_last(path)))


def looks_like_penalty(method: str) -> bool:
    """Whether a loss that a network is asked for is one of its weights, whatever it is given: `net.l2_loss(k)`."""
    return looks_like_loss(method) and bool(_PENALTY.search(method))


def looks_like_forward(method: str) -> bool:
    """Whether a method of a network is usually a part of its forward."""
    return bool(_FORWARD_METHOD.search(method)) and not _GIVES_INTEGERS.search(method)


def is_likelihood(method: str) -> bool:
    """Whether a method or an attribute is named like a loss or a likelihood, which is there to be differentiated."""
    return bool(_LIKELIHOOD.search(method))


def is_chance(name: str) -> bool:
    """Whether something is named like what a policy thinks of an action, beside the action itself."""
    return is_likelihood(name) or bool(_CHANCE.search(name))


def runs_network(method: str) -> bool:
    """Whether a method of a network runs it on what it is given, and leaves gradients as they are."""
    return bool(_RUNNING_METHOD.match(method.lstrip("_")))


def draws_from_network(method: str) -> bool:
    """Whether a method of a network draws samples from it, with gradients or without: `vae.sample(noise)`."""
    return method == "sample" or method.startswith("sample_")


def looks_like_sampling(path: str) -> bool:
    """Whether a called name draws samples step by step: `diffusion.p_sample_loop`, `sample_fn`."""
    return bool(_SAMPLING.search(last_of(path)))


def looks_like_noising(path: str) -> bool:
    """Whether a name may be the process that adds noise to samples, which has no weights: `self.diffuser`."""
    return bool(_NOISING.search(last_of(path)))


def goes_backwards(method: str) -> bool:
    """Whether a method of a network is usually the way back through it, written by hand: `attention_backward`."""
    return "backward" in method.lower()


def gives_gradients(method: str) -> bool:
    """Whether a method that is given nothing usually hands out the gradients that a backward has left."""
    return bool(_GIVES_GRADIENTS.search(method))


def looks_like_part(name: str) -> bool:
    """Whether what is called of a network is usually a layer or block of it: `net.fc(features)`."""
    return bool(_PART_NAME.match(name)) and not _VERB.match(name)


def is_letter_of_part(name: str) -> bool:
    """Whether what is called of a network is named by a letter, as the parts are of which its paper speaks: `net.Q(x)`.

    To be asked of a call only: `self.K` may be a number.
    """
    return bool(_LETTER_PART_NAME.match(name))


def looks_like_detaching(name: str) -> bool:
    """Whether a function out of sight is named like one that takes the graph off what it is given."""
    return bool(_DETACHING.search(name))


@lru_cache(MANY_NAMES)
def looks_like_training(name: str) -> bool:
    """Whether a function out of sight is named like one that backpropagates what it is given."""
    return bool(_TRAINING_VERB.search(name))


def looks_like_differentiating(path: str) -> bool:
    """Whether a call out of sight is named like one that asks for gradients of inputs: attacks, derivatives."""
    return bool(_DIFFERENTIATING.search(path))


def looks_like_logging(path: str) -> bool:
    """Whether a call is usually made to show or count something."""
    return bool(_LOGGING.search(path))


def looks_like_thawing(path: str) -> bool:
    """Whether a call is usually made to train weights again that were frozen: `unfreeze_layers(net, 3)`."""
    return bool(_THAWING.search(last_of(path)))


def looks_like_saving(path: str) -> bool:
    """Whether a call is usually made to write a network down, or to compare its loss with the best one so far."""
    return bool(_SAVING.search(last_of(path)))


def looks_like_metric(path: str) -> bool:
    """Whether an object is usually one that counts or compares what it is given: `confusion`, `coco_evaluator`."""
    return bool(_METRIC.search(last_of(path)))


def looks_like_record(path: str) -> bool:
    """Whether what comes beside a loss is usually for a log: `loss_dict`, `num_right`, `accuracy`."""
    return bool(_RECORD.search(last_of(path))) or looks_like_metric(path)


def looks_like_encoding(name: str) -> bool:
    """Whether a class is usually a fixed function of positions, sines and cosines, and no network."""
    return bool(_ENCODING_NAME.search(name))


@lru_cache(MANY_NAMES)
def looks_like_loss(name: str) -> bool:
    """Whether a called name is usually a criterion."""
    last = _last(name)
    return bool(_LOSS_NAME.search(last) or _LOSS_ABBREVIATION.match(last))


def looks_like_network_with_loss(name: str) -> bool:
    """Whether a name speaks of a network and its loss in one, or of one that predicts losses: `loss_model`.

    To be asked where uses say that it is trained.
    """
    return bool(_NETWORK_WITH_LOSS.search(name))


def looks_like_optimizer(name: str) -> bool:
    """Whether a name is usually an optimizer, as `optimizer_scheduler` and `optim["scheduler"]` are not."""
    return bool(_OPTIMIZER_NAME.search(_last(name))) and "sched" not in last_of(name).lower()


def looks_like_state(path: str) -> bool:
    """Whether a name is one that recurrent and memory states have."""
    return bool(_STATE_NAME.search(last_of(path)))


def looks_like_scaler(name: str) -> bool:
    """Whether a name is usually a gradient scaler."""
    return bool(_SCALER_NAME.search(last_of(name)))


def abbreviates_loss(name: str) -> bool:
    """Whether a name is a mere abbreviation of a loss, such as `ctc`, which a network may have as well."""
    return bool(_LOSS_ABBREVIATION.match(name)) or name == "crit"


def is_loss_not_weight(path: str) -> bool:
    """Whether a path is named like a loss, and not like what one is multiplied by."""
    return looks_like_loss(path) and not _WEIGHT_NAME.search(path)
