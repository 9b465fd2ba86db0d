from tandem_engine.memory.allocator import StepFence


def test_item_waits_until_its_step_settles() -> None:
    fence: StepFence[str] = StepFence()
    fence.hold(3, ["a", "b"])
    assert fence.settled(2) == []
    assert fence.settled(3) == ["a", "b"]
    assert fence.settled(3) == []


def test_later_step_settles_all_before_it() -> None:
    fence: StepFence[str] = StepFence()
    fence.hold(3, ["a"])
    fence.hold(4, ["b"])
    fence.hold(6, ["c"])
    assert sorted(fence.settled(5)) == ["a", "b"]
    assert list(fence) == ["c"]


def test_step_fence_passes_steps_up_to_latest_completed() -> None:
    fence: StepFence[str] = StepFence()
    assert not fence.passed(0)
    fence.settled(7)
    fence.settled(2)
    assert fence.passed(7)
    assert not fence.passed(8)


def test_length_counts_pages_waiting_for_every_step() -> None:
    fence: StepFence[str] = StepFence()
    fence.hold(1, ["a", "b"])
    fence.hold(2, ["c"])
    assert len(fence) == 3
