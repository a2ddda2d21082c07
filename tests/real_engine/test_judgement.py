"""The judges of the run, judged: run.sh plays these before anything else."""

import pathlib
import tempfile
import unittest

import answers
import chats
import engine_facts
import failures
from wire_client import Exchange, Outcome, judge_plain, judge_stream

CHUNK = b'data: {"choices":[{"delta":{"content":"ship "},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
ABORT = b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
ERROR = b'data: {"error":{"message":"engine died","code":500}}\n\n'
DONE = b"data: [DONE]\n\n"


class Streams(unittest.TestCase):
    """How a stream ended, by its bytes and by whether its framing was complete."""

    def check(self, payload: bytes, whole: bool, expected: Outcome) -> None:
        exchange = Exchange("id", True, 0.0)
        judge_stream(payload, whole, 2, exchange)
        self.assertEqual(exchange.outcome, expected, exchange.detail)

    def test_a_whole_stream_is_an_answer(self):
        self.check(CHUNK + CHUNK + LAST + USAGE + DONE, True, Outcome.OK)

    def test_done_is_false_after_an_error_an_abort_or_too_few_tokens(self):
        self.check(CHUNK + ERROR + DONE, True, Outcome.FALSE_DONE)
        self.check(CHUNK + ABORT + USAGE + DONE, True, Outcome.FALSE_DONE)
        self.check(CHUNK + CHUNK + LAST + USAGE.replace(b":2}", b":1}") + DONE, True, Outcome.FALSE_DONE)
        self.check(CHUNK + DONE, True, Outcome.FALSE_DONE)

    def test_an_error_event_without_done_tells_the_truth(self):
        self.check(CHUNK + ERROR, True, Outcome.ERROR_EVENT)
        self.check(CHUNK + ERROR, False, Outcome.ERROR_EVENT)

    def test_a_cut_is_seen_only_where_the_framing_shows_it(self):
        self.check(CHUNK + b'data: {"choi', False, Outcome.CUT_MIDSTREAM)
        self.check(CHUNK, True, Outcome.ENDS_SILENTLY)


class PlainReplies(unittest.TestCase):
    """The same for replies that are not streamed."""

    def check(self, payload: bytes, whole: bool, expected: Outcome) -> None:
        exchange = Exchange("id", False, 0.0)
        judge_plain(payload, whole, exchange)
        self.assertEqual(exchange.outcome, expected)

    def test_only_a_whole_reply_that_ended_by_length_is_an_answer(self):
        reply = (
            b'{"choices":[{"message":{"content":"ship"},"finish_reason":"length"}],'
            b'"usage":{"prompt_tokens":9,"completion_tokens":2}}'
        )
        self.check(reply, True, Outcome.OK)
        self.check(reply[:-5], False, Outcome.CUT_UNANSWERED)
        self.check(reply.replace(b"length", b"abort"), True, Outcome.BAD_BODY)
        self.check(b"null", True, Outcome.BAD_BODY)


class Promises(unittest.TestCase):
    """What a death forgives."""

    def forgives(self, scenario: str, stream: bool, outcome: Outcome, began: float = 1.0) -> bool:
        by_name = {each.name: each for each in failures.SCENARIOS}
        exchange = Exchange("id", stream, began, ended=9.0, outcome=outcome)
        return by_name[scenario].forgives(exchange, failures.Death(5.0, 5.1))

    def test_a_dead_replica_excuses_cuts_of_what_was_open_and_nothing_else(self):
        self.assertTrue(self.forgives("replica-kill", True, Outcome.CUT_MIDSTREAM))
        self.assertTrue(self.forgives("replica-kill", False, Outcome.CUT_UNANSWERED))
        self.assertFalse(self.forgives("replica-kill", True, Outcome.CUT_MIDSTREAM, began=6.0))
        self.assertFalse(self.forgives("replica-kill", True, Outcome.FALSE_DONE))
        self.assertFalse(self.forgives("replica-term", True, Outcome.CUT_MIDSTREAM))

    def test_a_dead_engine_excuses_error_events_of_streams_alone(self):
        self.assertTrue(self.forgives("engine-kill", True, Outcome.ERROR_EVENT))
        self.assertFalse(self.forgives("engine-kill", False, Outcome.HTTP_ERROR))
        self.assertFalse(self.forgives("engine-kill", True, Outcome.CUT_MIDSTREAM))
        self.assertFalse(self.forgives("engine-kill", True, Outcome.ERROR_EVENT, began=6.0))


class Facts(unittest.TestCase):
    """What is read from the engines, and the order of the chats."""

    def test_arrivals_are_found_in_every_log_of_an_engine(self):
        with tempfile.TemporaryDirectory() as directory:
            logs = [pathlib.Path(directory, name) for name in ("before", "after")]
            logs[0].write_text("x\nINFO Received request chatcmpl-a-1: params: P\nReceived request cmpl-b: p")
            logs[1].write_text("INFO Received request chatcmpl-a-1: params: P")
            self.assertEqual(engine_facts.arrivals({"e": logs}), {"a-1": ["e", "e"], "b": ["e"]})

    def test_warm_means_every_full_block_of_the_turn_before(self):
        before = Exchange("a", False, 0.0, prompt_tokens=97)
        self.assertTrue(chats.is_warm(before, Exchange("b", False, 0.0, cached_tokens=96)))
        self.assertFalse(chats.is_warm(before, Exchange("b", False, 0.0, cached_tokens=64)))

    def test_spaced_chats_leave_time_between_turns_and_back_to_back_ones_do_not(self):
        spaced = chats.Plan("s", chats=4, turns=2, clients=2, pace="spaced")
        self.assertEqual(spaced.order(0), [0, 2, 0, 2])
        back_to_back = chats.Plan("s", chats=4, turns=2, clients=2, pace="back-to-back")
        self.assertEqual(back_to_back.order(1), [1, 1, 3, 3])


class Answers(unittest.TestCase):
    """Whether two answers are one."""

    PLAIN = (
        b'{"id":"a","choices":[{"index":0,"text":"ship ","logprobs":{"tokens":["ship "],"token_logprobs":[%s]},'
        b'"finish_reason":"length"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}'
    )
    EVENT = b'data: {"id":"%s","choices":[{"index":0,"text":"%s","logprobs":{"tokens":["%s"]},"finish_reason":%s}]}\n\n'

    def test_ids_and_cached_tokens_do_not_make_a_difference(self):
        plain = answers.read_plain(200, self.PLAIN % b"-0.5")
        other = answers.read_plain(200, (self.PLAIN % b"-0.5").replace(b'"a"', b'"b"').replace(b":8", b":0"))
        self.assertTrue(answers.compare(plain, other).equal(0.0))
        self.assertEqual((plain.prompt_tokens, plain.cached_tokens, other.cached_tokens), (9, 8, 0))

    def test_numbers_are_compared_as_numbers_and_all_else_as_it_is(self):
        plain = answers.read_plain(200, self.PLAIN % b"-0.5")
        near = answers.compare(plain, answers.read_plain(200, self.PLAIN % b"-0.5001"))
        self.assertEqual(near.logprobs, 1)
        self.assertTrue(near.equal(1e-3))
        self.assertFalse(near.equal(1e-5))
        other = answers.read_plain(200, (self.PLAIN % b"-0.5").replace(b"ship ", b"boat "))
        self.assertFalse(answers.compare(plain, other).equal(1.0))
        self.assertFalse(answers.compare(plain, answers.read_plain(500, self.PLAIN % b"-0.5")).equal(1.0))

    def test_a_stream_is_what_its_chunks_say_together(self):
        def stream(*texts: bytes) -> answers.Answer:
            events = [self.EVENT % (b"x", text, text, b"null") for text in texts]
            return answers.read_stream(200, b"".join([*events, self.EVENT % (b"x", b"", b"", b'"length"'), DONE]))

        self.assertEqual(stream(b"ship ", b"sails").said["choices"]["0"]["text"], "ship sails")
        self.assertTrue(answers.compare(stream(b"ship "), stream(b"ship ")).equal(0.0))
        self.assertFalse(answers.compare(stream(b"ship "), stream(b"boat ")).equal(0.0))

    def test_a_stream_without_its_end_is_told_from_a_whole_one(self):
        event = self.EVENT % (b"x", b"ship ", b"ship ", b"null")
        whole, cut = answers.read_stream(200, event + DONE), answers.read_stream(200, event)
        self.assertFalse(answers.compare(whole, cut).equal(0.0))
        self.assertFalse(answers.compare(whole, answers.read_stream(200, event + DONE + DONE)).equal(0.0))
