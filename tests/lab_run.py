"""A lab whose cell is interrupted, and whose process then ends while the run goes on. Prints what it sees, one JSON a line."""
import _thread
import json
import sys
import threading
import time

from transformers import logging

from grpo_colab import demo
from grpo_colab.engine import Engine
from grpo_colab.lab import Lab


def say(*what): print(json.dumps(what), flush=True)


def until(step):
    end = time.time() + 100
    while trainer.state.global_step < step and lab.error is None and time.time() < end: time.sleep(.05)
    return trainer.state.global_step >= step


if __name__ == "__main__":
    logging.set_verbosity_error()
    trainer = demo.toy_trainer(sys.argv[1])
    lab = Lab(trainer).start()
    say("begun", until(2))
    again = Lab(trainer).start()  # the cell is run again
    say("same run", again._run is lab._run, sum(t.name == "training" for t in threading.enumerate()))
    threading.Timer(.5, _thread.interrupt_main).start()
    try: say("not interrupted", lab.wait(60))
    except KeyboardInterrupt as e: say("interrupted", e.__notes__[0])
    say("goes on", until(trainer.state.global_step + 2), Engine.running is trainer.engine)
