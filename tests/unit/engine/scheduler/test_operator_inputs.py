"""An operator's orders happen to every rank's scheduler in the same turn."""

from tandem_engine.messages.control import FlushCache, PauseGeneration, PauseMode, ResumeGeneration
from tandem_engine.scheduler.lockstep import apply
from tandem_testing.scheduler_builders import make_engine, make_message


def test_pause_flush_and_resume_are_inputs():
    engine = make_engine(page_size=2)
    engine.add(make_message(max_tokens=9))
    engine.step(3)
    apply(engine.scheduler, PauseGeneration(mode=PauseMode.RETRACT))
    assert engine.scheduler.paused
    assert engine.scheduler.audit().tree > 0
    apply(engine.scheduler, FlushCache())
    assert engine.scheduler.audit().tree == 0
    apply(engine.scheduler, ResumeGeneration())
    engine.run()
    engine.assert_expected()
