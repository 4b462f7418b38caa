"""A benchmark worker without a system: the first question of a batch says what shall happen. Plain JSON, to
start fast.

`die` kills itself, `hang` sleeps, `garble` writes no message, `fail` fails, `lose` forgets to answer;
anything else is answered. With an argument it never gets ready: `die` and `hang` as above.
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
        questions = json.loads(line)["questions"]
        text = questions[0]["text"]
        misbehave(text)
        if text == "garble":
            print("no message", flush=True)
        elif text == "fail":
            send(type="Failed", reason="RequestError: the prompt\nis empty")
        else:
            answer = {
                "token_ids": [1, 2],
                "num_prompt_tokens": len(questions[0]["prompt_token_ids"]),
                "block_times_s": [0.1, 0.6],
                "block_tokens": [1, 1],
                "num_rounds": 2,
            }
            send(type="Answers", answers=[answer] * (0 if text == "lose" else len(questions)))


if __name__ == "__main__":
    main()
