"""A benchmark worker without a system: its questions say what shall happen. Plain JSON, to start fast.

`die` kills itself, `hang` sleeps, `garble` writes no message, `fail` fails; anything else is answered. With
an argument it never gets ready: `die` and `hang` as above.
"""

import json
import os
import signal
import sys
import time


def send(**message: object) -> None:
    print(json.dumps(message), flush=True)


def misbehave(how: str) -> None:
    print("a library's chatter\n\nabout to " + how, file=sys.stderr, flush=True)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(60)


def main() -> None:
    json.loads(sys.stdin.readline())
    misbehave(sys.argv[1] if len(sys.argv) > 1 else "start")
    send(type="Ready", given="a fake")
    for line in sys.stdin:
        question = json.loads(line)
        misbehave(question["text"])
        if question["text"] == "garble":
            print("no message", flush=True)
        elif question["text"] == "fail":
            send(type="Failed", reason="RequestError: the prompt\nis empty")
        else:
            send(
                type="Answer",
                token_ids=[1, 2],
                num_prompt_tokens=len(question["prompt_token_ids"]),
                ttft_ms=1.0,
                num_decoded=1,
                decode_seconds=0.5,
                num_rounds=2,
                wall_seconds=0.6,
            )


if __name__ == "__main__":
    main()
