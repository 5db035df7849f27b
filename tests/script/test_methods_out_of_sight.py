"""Methods of networks whose class is in another file: what their names and uses elsewhere say."""

from __future__ import annotations

import pytest

VALIDATE = """
    import torch
    {made}

    def validate(model, loader):
        model.eval()
        for x, y in loader:
            {call}
"""
TRAINED = """
    import torch

    class Trainer:
        def __init__(self, model, head):
            self.model, self.head = model, head
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

        def train(self, loader):
            for x, y in loader:
                {trained}
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

        def validate(self, loader):
            for x, y in loader:
                {evaluated}
"""
STEP = """
    import torch
    from networks import Network

    model = Network().cuda()
    for x, y in loader:
        {forward}
        {loss}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TOTALS = """
    import torch

    def validate(model, loader):
        model.eval()
        kept = []
        for x, y in loader:
            {forward}
            {keep}
        return kept
"""


RUNNING = [
    *("encode", "decode", "embed", "encode_image", "evaluate_actions", "extract_features", "forward_features"),
    *("forward_encoder", "get_text_features", "get_embedding", "get_logits", "classify", "reconstruct"),
    *("_encode", "_decode"),
]


@pytest.mark.parametrize("name", RUNNING)
def test_a_method_named_like_a_run_of_the_network_is_a_forward(report, name):
    code = VALIDATE.format(made="pass", call=f"print(model.{name}(x).argmax(1))")
    assert report(code) == [("OOM201", 7)]
    quiet = VALIDATE.format(made="pass", call=f"with torch.no_grad(): print(model.{name}(x).argmax(1))")
    assert report(quiet) == []


MAY_TURN_THEM_OFF = ["generate(x)", "sample(8)", "predict(x)", "encode()", "sample_from_decoder(x)"]


@pytest.mark.parametrize("call", MAY_TURN_THEM_OFF)
def test_a_method_that_may_well_turn_gradients_off_is_not_judged(report, call):
    assert report(VALIDATE.format(made="pass", call=f"print(model.{call})")) == []


def test_sentence_transformers_turns_gradients_off_itself(report):
    code = """
        import torch
        from {package} import SentenceTransformer

        model = SentenceTransformer("small")
        model.eval()
        for texts in batches:
            print(model.encode(texts))
    """
    assert report(code.format(package="sentence_transformers")) == []
    assert report(code.format(package="networks")) == [("OOM201", 7)]


def test_a_method_through_which_a_loss_is_trained_records_in_a_validation_as_well(report):
    code = TRAINED.format(
        trained="loss = -self.model.score(x, y)", evaluated="print(self.model.score(x, y).item(), self.head.score(x))"
    )
    assert report(code) == [("OOM201", 17), ("OOM202", 10)]


def test_a_method_that_is_given_nothing_reads_what_another_has_left(report):
    trained = "self.model.update_state(x); loss = -self.model.score()"
    evaluated = "self.model.update_state(x); print(self.model.score().mean().item())"
    found = report(TRAINED.format(trained=trained, evaluated=evaluated))
    assert [finding for finding in found if finding[0] == "OOM201"] == []


@pytest.mark.parametrize(
    "trained",
    [
        "loss = self.criterion(self.model(x), self.model.targets(y))",
        "loss = self.model(x).mean(); self.model.targets(y)",
    ],
)
def test_a_method_whose_result_a_loss_is_not_made_of_alone_says_nothing(report, trained):
    found = report(TRAINED.format(trained=trained, evaluated="print(self.model.targets(y))"))
    assert [finding for finding in found if finding[0] == "OOM201"] == []


@pytest.mark.parametrize(
    ("forward", "loss"),
    [
        ("out = model.get_logits(x)", "loss = criterion(out, y)"),
        ("out = model.get_logit(x)", "loss = criterion(out, y)"),
        ("out = model.get_features(x, y)", "loss = out.mean()"),
        ("out = model.get_value(x)", "loss = criterion(out, y)"),
        ("_, chance, _, out = model.get_action_and_value(x, y)", "loss = (out - chance).mean()"),
    ],
)
def test_what_a_network_gets_from_what_it_is_given_is_its_forward(report, forward, loss):
    assert report(STEP.format(forward=forward, loss=loss)) == [("OOM202", 6)]


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("predict_with_weights(x, weights)", [("OOM202", 6)]),
        ("infer(x)", [("OOM202", 6)]),
        ("module.infer(x)", [("OOM202", 6)]),
        ("predict_start_from_noise(x, noise)", []),
        ("q_sample(x, noise)", []),
    ],
)
def test_what_a_network_predicts_for_a_loss_is_its_forward(report, method, found):
    assert report(STEP.format(forward=f"out = model.{method}", loss="loss = criterion(out, y)")) == found


@pytest.mark.parametrize("read", ["model.get_features()", "model.get_parameters(x)", "model.get_config(x)"])
def test_what_a_network_is_asked_for_is_none(report, read):
    assert report(STEP.format(forward=f"held = {read}", loss="loss = criterion(y)")) == []


@pytest.mark.parametrize(
    ("read", "found"),
    [
        ("model.extract_grad()", []),
        ("model.flat_gradients()", []),
        ("model.forward_grad(x)", ["OOM102"]),
        ("model.forward_gradual(x)", ["OOM102"]),
    ],
)
def test_the_gradients_that_a_network_hands_out_carry_no_graph(report, read, found):
    code = TOTALS.format(forward=f"left = {read}", keep="kept.append(left)")
    assert sorted({code for code, _ in report(code) if code == "OOM102"}) == found


@pytest.mark.parametrize("keep", ["kept.append(tags)", "kept.extend(tags)", "kept.extend([tag for tag in tags])"])
def test_what_a_method_gives_beside_others_may_be_anything(report, keep):
    several = TOTALS.format(forward="loss, tags = model.forward_all(x, y)", keep=keep)
    assert [finding for finding in report(several) if finding[0] == "OOM102"] == []
    one = TOTALS.format(forward="tags = model.forward_all(x, y)", keep=keep)
    assert [finding for finding in report(one) if finding[0] == "OOM102"] == [("OOM102", 8)]


def test_a_pipeline_of_transformers_turns_gradients_off_itself(report):
    code = """
        import torch
        from transformers import pipeline

        def evaluate(detector, images):
            for image in images:
                print(detector(image))

        evaluate({made}, images)
    """
    assert report(code.format(made='pipeline("object-detection")')) == []
    assert report(code.format(made='build("object-detection")')) == [("OOM201", 6)]


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ('data_transforms["val"]', []),
        ("transforms.Compose(parts)", []),
        ("get_transforms()", []),
        ('networks["val"]', [("OOM201", 8)]),
        ("torchvision.transforms.Compose(parts)", []),
        ("wrapped(config.data_transform)", [("OOM201", 8)]),
    ],
)
def test_a_transform_of_images_is_no_transformer(report, made, found):
    code = f"""
        import torch
        model = build()
        model.eval()
        inputs = []
        transformer = {made}
        for image in images:
            print(transformer(image))
    """
    assert report(code) == [(code, line - 1) for code, line in found]


@pytest.mark.parametrize(("read_as", "found"), [('parts["kl"]', [6]), ('parts.get("kl", 0.0)', [])])
def test_a_part_of_a_loss_that_may_be_a_number_is_not_judged(report, read_as, found):
    code = f"""
        total = 0
        for x, y in loader:
            parts = criterion(model(x), y)
            parts["sum"].backward()
            optimizer.step()
            total += {read_as}
    """
    assert [line for code, line in report(code) if code == "OOM101"] == found


@pytest.mark.parametrize("read_as", ["parts[part]", "parts.get(part, 0.0)", "parts.get(part)"])
def test_the_loss_is_among_its_parts_where_all_of_them_are_added(report, read_as):
    code = f"""
        totals = dict.fromkeys(["sum", "kl"], 0)
        for x, y in loader:
            parts = criterion(model(x), y)
            parts["sum"].backward()
            optimizer.step()
            for part in totals:
                totals[part] += {read_as}
    """
    assert [line for code, line in report(code) if code == "OOM101"] == [7]


def test_a_network_whose_gradients_are_zeroed_is_one_under_any_name(report):
    code = """
        class Saliency:
            def __init__(self, m):
                self.m = m

            def __call__(self, x):
                {zero}
                out = self.m(x)
                (out * (out > 0.5)).sum().backward(retain_graph=True)
    """
    assert report(code.format(zero="self.m.zero_grad()")) == [("OOM103", 8)]
    assert report(code.format(zero="pass")) == []


ENCODING = """
    import torch

    def embed({name}, loader, device):
        for x in loader:
            code = {name}.encode(x.to(device))
            print(code.argmax(1).cpu())
            show({name}.{other}(code))
"""


@pytest.mark.parametrize("name", ["vae", "net", "autoencoder"])
def test_a_network_that_encodes_and_decodes_runs_in_both(report, name):
    assert report(ENCODING.format(name=name, other="decode")) == [
        ("OOM201", 5),
        ("OOM201", 7),
    ]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("model", "similarity"),
        ("tokenizer", "decode"),
        ("codec", "decode"),
        ("encoder", "decode"),  # no encoder does both
        ("text_enc", "decode"),
    ],
)
def test_what_encodes_only_may_turn_gradients_off_itself_or_be_no_network(report, name, other):
    assert report(ENCODING.format(name=name, other=other)) == []


@pytest.mark.parametrize(
    ("name", "found"), [("vgg", [6, 7]), ("self.vgg16", [6, 7]), ("inception", [6, 7]), ("resize", [6])]
)
def test_a_network_is_told_by_the_name_of_its_architecture(report, name, found):
    code = f"""
        import torch
        from elsewhere import *

        def train(self, generator, {name.removeprefix("self.")}, loader, optimizer):
            for low, high in loader:
                image = generator(low.cuda())
                error = ({name}(image) - high).abs().mean()
                optimizer.zero_grad(set_to_none=True)
                error.backward()
                optimizer.step()
    """
    assert report(code) == [("OOM202", line) for line in found]


AGENT = """
    import torch

    class Agent{base}:
        def greedy_policy(self, state):
            return self.table[state]

        def learn(self, loader):
            for x, y in loader:
                criterion(self.network(x), y).backward()
                self.optimizer.step()

    def test(agent, env):
        state = env.reset()
        for t in range(100):
            action = agent.{policy}(state, 0.05)
            state, reward, done, info = env.step(action)
"""


@pytest.mark.parametrize("rest", ["", "    agent = make()\n    agent.train()\n"])
def test_a_method_of_an_object_is_no_network_of_its_name(report, rest):
    code = AGENT.format(base="", policy="greedy_policy") + rest
    assert ("OOM201", 15) not in report(code)


@pytest.mark.parametrize(("base", "policy"), [("", "other_policy"), ("(torch.nn.Module)", "greedy_policy")])
def test_a_name_of_a_network_says_that_it_is_one_otherwise(report, base, policy):
    assert ("OOM201", 15) in report(AGENT.format(base=base, policy=policy))


ENTRIES = """
    import torch

    def train(self, loader):
        for x, y in loader:
            out = {called}(x.cuda())
            loss = torch.nn.functional.mse_loss(out, y)
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    "called", ["self.data['model']", "self.parts['first']['net']", "args['encoder']", "self.model['first']"]
)
def test_an_entry_under_the_name_of_a_network_is_one(report, called):
    assert ("OOM202", 5) in report(ENTRIES.format(called=called))


@pytest.mark.parametrize("called", ["self.losses['model']", "self.data['rows']", "self.criterion['net']"])
def test_an_entry_under_another_name_or_of_losses_is_none(report, called):
    assert ("OOM202", 5) not in report(ENTRIES.format(called=called))


@pytest.mark.parametrize("part", ["attention", "self_attn", "fc_out", "fc_mu", "fc_log_var", "logvar", "gen_forward"])
def test_a_layer_that_is_called_of_a_network_runs_a_part_of_it(report, part):
    assert ("OOM201", 7) in report(VALIDATE.format(made="", call=f"print(model.{part}(x).mean().item())"))


@pytest.mark.parametrize("other", ["attention_weights_of", "fc_names", "log", "pre_forward"])
def test_another_method_may_run_none(report, other):
    assert ("OOM201", 7) not in report(VALIDATE.format(made="", call=f"print(model.{other}(x).mean().item())"))


@pytest.mark.parametrize(
    ("forward", "loss", "found"),
    [
        ("pass", "loss = model.get_loss(x, y)", [7]),
        ("pass", "loss = model.get_loss(*batch)", [7]),
        ("pass", "loss = model.get_loss()", []),
        ("out = model(x)", "loss = model.get_loss(out, y)", [6]),
        ("pass", "loss = losses.get_loss(x, y)", []),
    ],
)
def test_a_loss_that_a_network_gets_of_a_batch_is_a_forward(report, forward, loss, found):
    assert report(STEP.format(forward=forward, loss=loss)) == [("OOM202", line) for line in found]


IMPORTED = """
    import torch
    from project import vae, loader

    def train():
        optimizer = torch.optim.Adam({parameters})
        for x in loader:
            loss = criterion(vae.decode(vae.encode(x.to("cuda"))), x)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(("parameters", "found"), [("vae.parameters()", [("OOM202", 7)]), ("project.parameters()", [])])
def test_an_imported_network_is_known_by_its_parameters(report, parameters, found):
    assert report(IMPORTED.format(parameters=parameters)) == found


UPDATED = """
    import torch

    class Updater:
        def __init__(self, {name}):
            self.{name} = {name}
            self.optimizer = torch.optim.Adam({given}, lr=0.1)

        def update(self, loader):
            for x, y in loader:
                values, chances = self.{name}.evaluate_actions(x.cuda(), y)
                loss = surrogate_loss(values, chances, y)
                loss.backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("policy", "self.policy.get_model_parameters()", [("OOM202", 10)]),
        ("policy", "self.settings.get_model_parameters()", []),
        ("rules", "self.rules.get_model_parameters()", []),
    ],
)
def test_what_gives_an_optimizer_its_parameters_under_the_name_of_a_network_is_one(report, name, given, found):
    assert report(UPDATED.format(name=name, given=given)) == found


TRANSLATION = """
    import torch
    from agents import Agent

    agent = Agent(config)
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        {encoded}
        {judged}
        loss = {loss}
        loss.backward()
        optimizer.step()
"""
ENCODED = "fake = agent.{gen}.decode(agent.{gen}.encode(x))"


@pytest.mark.parametrize(
    ("gen", "found"), [("gen_A", [7]), ("disc_a", [7]), ("gen_AB", [7]), ("gen_id", []), ("codec", []), ("gen", [])]
)
def test_a_network_of_an_agent_is_told_by_its_name_and_by_what_it_is_asked_for(report, gen, found):
    code = TRANSLATION.format(encoded=ENCODED.format(gen=gen), judged="pass", loss="(fake - y).abs().mean()")
    assert [line for code, line in report(code) if code == "OOM202"] == found


@pytest.mark.parametrize(
    ("judged", "found"),
    [
        ("wrong = agent.disc_A.generator_loss(fake)", [7, 8]),
        ("wrong = agent.disc_A.discriminator_loss(fake.detach(), y)", [8]),
        ("wrong = agent.gen_A.reconstruction_loss(fake, y)", [7]),  # of what it gave itself
        ("wrong = agent.loss_A.generator_loss(fake)", [7]),
        ("wrong = agent.disc_A.gradient_penalty_loss(fake)", [7]),
    ],
)
def test_a_discriminator_that_is_asked_for_a_loss_of_what_others_gave_runs(report, judged, found):
    code = TRANSLATION.format(encoded=ENCODED.format(gen="gen_A"), judged=judged, loss="2 * wrong")
    assert [line for code, line in report(code) if code == "OOM202"] == found


@pytest.mark.parametrize(("method", "found"), [("sparsity_loss", []), ("flow_loss", [("OOM202", 6)])])
def test_a_loss_of_the_weights_is_no_forward_whatever_it_is_given(report, method, found):
    assert report(STEP.format(forward=f"loss = model.{method}(target, weight=120)", loss="pass")) == found


@pytest.mark.parametrize(("holder", "found"), [("autoencoder", [("OOM201", 6)]), ("vae", [("OOM201", 6)]), ("bpe", [])])
def test_what_an_autoencoder_encodes_for_others_needs_no_graph(report, holder, found):
    code = f"""
        import torch
        {holder} = load_checkpoint(config)

        def encode(x):
            code = {holder}.encode(torch.tensor(x))
            return code.squeeze().detach().cpu().numpy()
    """
    assert report(code) == [(code, line - 1) for code, line in found]


@pytest.mark.parametrize(
    ("trained", "given", "found"),
    [
        ("self.model.tail", "", [14]),
        ("self.model.other", "", []),
        ("self.tail", "self.tail = build_tail()", [14]),
        ("self.model.tail", "self.tail = weighted", []),
    ],
)
def test_what_no_line_gives_an_object_is_the_network_of_that_name(report, trained, given, found):
    code = f"""
        import torch
        from project import Base, weighted

        class Trainer(Base):
            def __init__(self, model):
                self.model = model
                {given or "pass"}
                self.optimizer = torch.optim.Adam({trained}.parameters())

            def validate(self, loader):
                self.model.eval()
                for x in loader:
                    print(self.tail(x).mean())
    """
    assert [line + 1 for code, line in report(code) if code == "OOM201"] == found


@pytest.mark.parametrize(("measure", "found"), [("SSIM", []), ("Blender", [("OOM202", 8)])])
def test_a_similarity_of_images_is_no_network(report, measure, found):
    name = measure.lower()
    code = f"""
        import torch
        from measures import {measure}
        {name} = {measure}().to(device)
        model = torch.nn.Linear(8, 8).to(device)
        for x, y in loader:
            out = model(x)
            loss = 1 - {name}(out, y).mean()
            loss.backward()
            optimizer.step()
    """
    assert [one for one in report(code) if one[1] != 6] == [(code, line - 1) for code, line in found]


HANDED_OVER = """
    import torch

    def train({given}, loader, optimizer):
        for x, y in loader:
            loss = criterion({given}({arguments}), y.cuda())
            loss.backward()
            optimizer.step()
        torch.save({given}.{asked}, "saved.pth")
"""


@pytest.mark.parametrize(
    ("given", "asked", "found"),
    [
        ("Enc1", "state_dict()", [("OOM202", 5)]),
        ("Decoder", "state_dict()", [("OOM202", 5)]),
        ("Enc1", "name", []),  # a class
        ("Thing", "state_dict()", []),
    ],
)
def test_a_network_with_a_capital_is_told_from_a_class_by_its_state(report, given, asked, found):
    assert report(HANDED_OVER.format(given=given, asked=asked, arguments="x.cuda()")) == found


SUMMED = """
    import torch

    def train(D1, loader, optimizer):
        for x, y in loader:
            terms = {terms}
            {total}
            total.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("terms", "total", "found"),
    [
        ("0", "total = D1.compute_loss(x.cuda(), 1) + D1.compute_loss(y.cuda(), 0)", [6, 6]),
        ("0", "total = -D1.compute_loss(x.cuda(), 1) - penalty(y)", [6]),
        ("args.weight * D1.compute_loss(x.cuda(), 1)", "total = terms + penalty(y)", [5]),
        ("args.weight * D1.compute_weight(x.cuda(), 1)", "total = terms + penalty(y)", []),
        ("D1.compute_loss(x.cuda(), 1)", "total = penalty(y)", []),
    ],
)
def test_what_is_called_for_a_term_of_a_loss_gives_one(read, terms, total, found):
    loops = read(SUMMED.format(terms=terms, total=total)).loops
    assert [forward.node.lineno for loop in loops for forward in loop.forwards] == found


SAMPLED = """
    import torch
    from networks import VAE

    def save_samples(model, noise, path):
        {drawn}
        write(path, {shown})

    model = VAE()
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    save_samples(model, torch.randn(8, 16), "samples.png")
"""


@pytest.mark.parametrize(
    ("drawn", "shown", "found"),
    [
        ("images = model.sample(noise)", "images.detach().cpu().numpy()", [("OOM201", 5)]),
        ("images, latent = model.sample_images(noise)", "images.view(-1).data.cpu()", [("OOM201", 5)]),
        ("images = model.sample(noise)[0]", "images.data.numpy()", [("OOM201", 5)]),
        ("pass", "model.sample(noise).cpu().detach().numpy()", [("OOM201", 6)]),
        ("images = model.sample(noise)", "images.cpu().numpy()", []),
        ("images = model.sample(noise); other = y.detach()", "images.cpu()", []),
        ("images = model.generate(noise)", "images.detach().cpu().numpy()", []),
    ],
)
def test_samples_that_are_taken_off_their_graph_had_one(report, drawn, shown, found):
    assert report(SAMPLED.format(drawn=drawn, shown=shown)) == found


def test_what_a_network_looks_up_in_what_it_gave_is_no_run_of_its_own(report):
    call = "out = model(x); print(model.get_word_embeddings(out).argmax(1))"
    assert report(VALIDATE.format(made="pass", call=call)) == [("OOM201", 7)]
    apart = "out = model(x)\n            print(model.get_word_embeddings(out).argmax(1))"
    assert report(VALIDATE.format(made="pass", call=apart)) == [("OOM201", 7)]


def test_samples_that_are_taken_off_their_graph_for_a_training_iteration_are_no_part_of_it(report):
    code = """
        import torch

        generator = Generator().cuda()
        for step in range(1000):
            samples = generator.sample(64, 20)
            inputs = torch.cat([zeros, samples.data], dim=1)
            criterion(generator(inputs), targets).backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 7)]


@pytest.mark.parametrize(
    ("given", "term", "found"),
    [
        ("action, act_prob", "(act_prob * y).sum()", True),
        ("action, log_prob, entropy", "entropy.mean()", True),
        ("action, action_prob", "(action_prob * y).sum()", True),
        ("action, seen", "(seen * y).sum()", False),
        ("action, prob", "other.mean()", False),
    ],
)
def test_what_a_policy_gets_beside_an_action_is_its_forward_where_it_makes_a_term_of_the_loss(
    report, given, term, found
):
    forward = f"out = model.get_value(x)\n        {given} = model.get_action(x)"
    loss = f"first = criterion(out, y); second = -{term}; loss = first + 0.1 * second"
    assert (("OOM202", 7) in report(STEP.format(forward=forward, loss=loss))) == found


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ("first - 0.5 * reward", True),
        ("(first + reward) / 2", True),
        ("(reward - first) ** 2", False),
        ("(reward - first).abs().mean() + first", False),
        ("first * reward", False),
    ],
)
def test_what_a_loss_compares_with_is_no_term_of_it(report, loss, found):
    forward = "out = model.get_value(x)\n        action, prob = model.get_action(x)"
    code = STEP.format(forward=forward, loss=f"first = criterion(out, y); reward = prob.mean(); loss = {loss}")
    assert (("OOM202", 7) in report(code)) == found


MOVED = """
    import torch
    from networks import Network, load

    model = Network().cuda()
    {made}
    for x, y in loader:
        fake = model(x)
        loss = {judge}.get_features(fake).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "judge", "found"),
    [
        ("face_net = load('a.pth'); face_net.to(device)", "face_net", True),
        ("self.extractor = load('a.pth'); self.extractor.cuda()", "self.extractor", True),
        ("face_net = load('a.pth'); print(face_net.to(device))", "face_net", False),
        ("faces = load('a.pth'); faces.to(device)", "faces", False),
    ],
)
def test_what_a_statement_moves_to_a_device_is_a_network_by_its_name(report, made, judge, found):
    lines = [line for code, line in report(MOVED.format(made=made, judge=judge)) if code == "OOM202"]
    assert lines == ([7, 8] if found else [7])
