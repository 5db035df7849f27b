"""Comments, and statements that share a line."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP, apply, loop_of


def test_comments_at_the_end_of_a_block_stay_in_it():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            with torch.enable_grad():
                out = model(x)
                # out = model(x, y)

                # not yet
            # the loss
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        """)
    assert (
        "            out = model(x)\n            # out = model(x, y)\n\n            # not yet\n"
        "        # the loss\n        loss = F"
    ) in text


def test_code_commented_out_right_below_a_statement_stays_with_it_where_a_blank_line_follows():
    assert loop_of("""\
        for x, y in loader:
            out = model(x)
            # out = out.float()

            loss = F.cross_entropy(out, y)
            print(loss.item())
            # print(out.argmax(1))
            # print(y)

            # gradients, and a step
            optimizer.zero_grad()
            loss.backward()
            # scaler.scale(loss).backward()

            optimizer.step()
        """) == textwrap.dedent("""\
        for x, y in loader:
            def forward(x, y):
                out = model(x)
                # out = out.float()

                loss = F.cross_entropy(out, y)
                return loss

            # gradients, and a step
            loss = memory.forward_backward(forward, x, y)
            # scaler.scale(loss).backward()
            print(loss.item())
            # print(out.argmax(1))
            # print(y)

            memory.step(optimizer)
        """)


def test_a_headline_over_a_paragraph_goes_with_what_follows():
    text = loop_of("""\
        for x, y in loader:
            print(x.shape)

            # forward

            out = model(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    assert "    def forward(x, y):\n        # forward\n\n        out = model(x)\n" in text


def test_a_loop_with_semicolons_is_split_and_keeps_them():
    assert loop_of("""\
        for x, y in loader:
            optimizer.zero_grad();
            loss = F.cross_entropy(model(x), y);
            loss.backward();
            optimizer.step();
        """) == textwrap.dedent("""\
        for x, y in loader:
            def forward(x, y):
                loss = F.cross_entropy(model(x), y);
                return loss

            memory.forward_backward(forward, x, y);
            memory.step(optimizer);
        """)


def test_a_comment_behind_the_backward_stands_behind_its_call():
    assert "memory.forward_backward(forward, x, y)  # gradients\n" in loop_of("""\
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()              # gradients
            optimizer.step()             # update
        """)


def test_statements_joined_on_a_line_get_lines_of_their_own_where_the_loss_is_lifted():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad(); out = model(x)
            loss = F.cross_entropy(out, y); print(loss.item())
            loss.backward(); optimizer.step()  # train
        """)
    assert text == textwrap.dedent("""\
        for x, y in loader:
            def forward(x, y):
                out = model(x)
                loss = F.cross_entropy(out, y)
                return loss

            loss = memory.forward_backward(forward, x, y)
            print(loss.item())
            memory.step(optimizer)  # train
        """)


@pytest.mark.parametrize("comment", ["", "  # next"])
def test_neighbours_on_one_line_that_both_go_leave_nothing(comment):
    text, loops = apply(f"""\
        scaler = torch.amp.GradScaler()
        for x, y in loader:
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad(){comment}
        """)
    assert loops[0][0] == "micro-batched"
    assert f"    memory.step(optimizer){comment}\n" in text


def test_joined_statements_stay_where_the_loss_cannot_be_lifted_for_another_reason():
    text, loops = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            first = F.cross_entropy(out, y)
            first.backward(); print(first.item())
            second = F.mse_loss(model(x), out)
            second.backward(); optimizer.step()
        """)
    assert loops[0][0] == "in-place"
    assert "memory.backward(first); print(first.item())" in text


def test_a_comment_that_the_longer_call_has_no_room_for_stands_above_it():
    comment = "# goes through the network, and leaves a gradient in each of its parameters for the step"
    text, _ = apply(f"""\
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  {comment}
            optimizer.step()
        """)
    assert f"    {comment}\n    memory.forward_backward(forward, images, labels)\n" in text


def test_a_blank_line_ahead_of_the_backward_stays_ahead_of_what_follows_it():
    body = """\
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            print(loss.shape)

            loss.backward()
            optimizer.step()
        """
    below = "    loss = memory.forward_backward(forward, x, y)\n    print(loss.shape)\n{}    memory.step(optimizer)\n"
    assert below.format("\n") in loop_of(body)
    assert below.format("") in loop_of(body.replace("print(loss.shape)\n\n", "print(loss.shape)\n"))
    assert below.format("\n") in loop_of(body.replace("loss.backward()\n", "loss.backward()\n\n"))


def test_a_reset_that_ends_its_block_takes_the_blank_line_above_it_along():
    """Two blank lines would meet where the block ends; one above code that follows at once parts the two blocks."""
    body = """\
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if (i + 1) % 2 == 0 or i + 1 == len(loader):
                optimizer.step()
                print(i)

                # clear gradients
                optimizer.zero_grad()

            print(loss.item())
        """
    assert "        print(i)\n\n    print(loss.item())\n" in loop_of(body)
    assert "        print(i)\n\n    print(loss.item())\n" in loop_of(body.replace("zero_grad()\n\n", "zero_grad()\n"))
    assert "        print(i)\n\n    print(loss.item())\n" in loop_of(body.replace("print(i)\n\n", "print(i)\n"))


def test_a_comment_on_a_reset_goes_with_it_below_code_that_is_commented_out():
    """A comment below words is the end of what they say, and stays with them."""
    body = """\
        for x, y in loader:
            x = x.float()
            {above}
            # clear the gradients of all optimized variables
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """
    assert "clear the" not in (text := loop_of(body.format(above="#x, _ = data")))
    assert "#x, _ = data\n" in text
    assert "clear the" in loop_of(body.format(above="# As in the paper:"))


def test_a_comment_that_goes_on_below_a_reset_goes_with_it():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()  # gradients of the last iteration
                                   # would be added to otherwise
            # what the network gives
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        """)
    assert "would be added" not in text and "# what the network gives" in text


def test_a_form_feed_in_front_of_a_statement_is_no_part_of_its_margin():
    text = loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
        \f
            loss = F.cross_entropy(model(x), y)
        \f    if loss > 0:
        \f        loss = loss * 2
            loss.backward()
        \f    optimizer.step()
        """)
    assert text == textwrap.dedent("""\
        for x, y in loader:
            def forward(x, y):
                loss = F.cross_entropy(model(x), y)
                if loss > 0:
                    loss = loss * 2
                return loss

            memory.forward_backward(forward, x, y)
        \f    memory.step(optimizer)
        """)


@pytest.mark.parametrize("ends", ["\n\r\n", "\r\n\n"])
def test_a_file_with_two_kinds_of_line_ends_is_rewritten_as_with_one(ends):
    """Some editors write their own line ends into a file that has others."""
    body = """\
        scaler = torch.cuda.amp.GradScaler()
        for i, (x, y) in enumerate(loader):
            with torch.cuda.amp.autocast():
                out = model(x)
                loss = F.cross_entropy(out, y)
            scaler.scale(loss).backward()
            if (i + 1) % 2 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            del out, loss
        """
    text = TOP + textwrap.dedent(body)
    expected = rewritten(text).text
    lines = text.splitlines()
    first, second = ends[: ends.index("\n") + 1], ends[ends.index("\n") + 1 :]
    for count in range(1, len(lines)):
        mixed = "".join(line + (first if number < count else second) for number, line in enumerate(lines))
        assert rewritten(mixed).text.splitlines() == expected.splitlines()


def test_blank_lines_that_keep_their_place_keep_the_white_space_in_them():
    text = rewritten(
        TOP
        + "for x, y in loader:\n    out = model(x)\n    loss = F.cross_entropy(out, y)\n    print(loss.item())\n   \n"
        + "    print(out.shape)\n    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    ).text
    assert "    print(loss.item())\n   \n    print(out.shape)\n" in text


def test_comments_further_left_than_their_block_stay_as_they_are_in_statements_that_keep_their_margin():
    text = loop_of("""\
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            right += (out.argmax(1) == y).sum().item()

          #  print(right, "so far")

            log(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    below = '    right += (out.argmax(1) == y).sum().item()\n\n  #  print(right, "so far")\n\n    log(loss.item())\n'
    assert f"forward_backward(forward, x, y)\n{below}" in text


def test_a_string_that_comments_goes_with_what_it_is_about():
    assert loop_of('''\
        for x, y in loader:
            """ Forward. """
            out = model(x)

            """ Loss, summed up:
                of all samples. """
            loss = F.cross_entropy(out, y)

            """ Numbers. """
            print(out.shape)

            """ One may wrap `zero_grad`. """
            model.zero_grad()
            loss.backward()

            """ Step. """
            optimizer.step()
        ''') == textwrap.dedent('''\
        for x, y in loader:
            """ Forward. """

            def forward(x, y):
                out = model(x)

                """ Loss, summed up:
                of all samples. """
                loss = F.cross_entropy(out, y)
                return loss, out

            """ One may wrap `zero_grad`. """
            model.zero_grad()
            _, out = memory.forward_backward(forward, x, y)

            """ Numbers. """
            print(out.shape)

            """ Step. """
            memory.step(optimizer, zero_grad=False)
        ''')


def test_a_string_above_the_backward_stays_above_the_call():
    assert loop_of("""\
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            'backward'
            loss.backward()
            'step'
            optimizer.step()
        """) == textwrap.dedent("""\
        for x, y in loader:

            def forward(x, y):
                loss = F.cross_entropy(model(x), y)
                return loss

            'backward'
            memory.forward_backward(forward, x, y)
            'step'
            memory.step(optimizer)
        """).replace("loader:\n\n", "loader:\n")


def test_a_level_of_indentation_is_that_of_the_blocks_not_of_lines_inside_brackets():
    text = TOP + textwrap.dedent("""\
        def train(
                loader,
                epochs=1):
            for x, y in loader:
                predicted_scores, others = model(x), model(-x)
                optimizer.zero_grad()
                total_of_all_losses = F.cross_entropy(predicted_scores, y)
                total_of_all_losses.backward()
                optimizer.step()
                print(total_of_all_losses, predicted_scores.argmax(1), others.argmax(1))


        train(loader)
        """)
    assert "memory.forward_backward(\n            forward, x, y\n        )\n" in rewritten(text).text
