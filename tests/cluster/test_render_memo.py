"""Texts that requests have in common are rendered once, and never taken for one another."""

from warmstate.cluster.text.render_memo import RenderMemo


class Renderer:
    """Counts how often it is asked."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.num_calls = 0

    def __call__(self) -> str | None:
        self.num_calls += 1
        return self.text


def test_the_same_sources_are_rendered_once() -> None:
    memo, renderer = RenderMemo(), Renderer("hello")
    sources = [[{"role": "system", "content": "be kind"}], None, {"enable_thinking": False}]
    assert [memo.get(sources, renderer) for _ in range(3)] == ["hello"] * 3
    assert renderer.num_calls == 1


def test_other_sources_are_rendered_anew() -> None:
    memo = RenderMemo()
    assert memo.get([{"enable_thinking": True}], Renderer("thinking")) == "thinking"
    assert memo.get([{"enable_thinking": "True"}], Renderer("text")) == "text"
    assert memo.get([{"enable_thinking": 1}], Renderer("one")) == "one"


def test_what_was_used_least_recently_goes_first() -> None:
    memo = RenderMemo(max_entries=2)
    for name in ("a", "b", "a", "c"):
        memo.get([name], Renderer(name))
    kept, gone = Renderer("a"), Renderer("b")
    memo.get(["a"], kept)
    memo.get(["b"], gone)
    assert (kept.num_calls, gone.num_calls) == (0, 1)


def test_refusals_and_long_texts_are_not_kept() -> None:
    memo = RenderMemo()
    for renderer in (Renderer(None), Renderer("x" * (1 << 19))):
        assert [memo.get(["same"], renderer) for _ in range(2)] == [renderer.text] * 2
        assert renderer.num_calls == 2
