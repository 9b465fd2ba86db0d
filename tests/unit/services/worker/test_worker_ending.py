"""A worker has one reason to end, however many things go wrong on the way."""

from tandem_services.worker.service import EXIT_FAILED, EXIT_OK, Ending, FirstEnding


async def test_the_first_reason_to_end_counts():
    ending = FirstEnding()
    ending.say(EXIT_FAILED, "the engine process exited with status 70")
    ending.say(EXIT_OK, "drained")
    assert await ending.wait() == Ending(EXIT_FAILED, "the engine process exited with status 70")
