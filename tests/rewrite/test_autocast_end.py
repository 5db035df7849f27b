"""Where an autocast block ends: ahead of the backward."""

from tests.rewrite.small_loops import apply


def test_a_backward_inside_of_autocast_moves_out_and_the_loop_is_split():
    text, forms = apply("""\
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
                # far from here
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """)
    assert forms == [("micro-batched", None)]
    assert "        return loss\n\n    # far from here\n    memory.forward_backward(forward, x, y)\n" in text
