"""Start a run on Hugging Face Jobs, or stop one.

    python start.py --bucket me/grpo --dry-run                                  what would be asked of the Hub; starts nothing
    python start.py --bucket me/grpo --replicas 2 --flavor h200 --timeout 4h    the trainer's Job, which starts the replicas'
    python start.py --stop grpo-1                                               end trainer and replicas
    python start.py --bucket me/grpo -- --max_steps 50 --resume                 what follows -- goes to trainer.py

The trainer and its replicas are in one network group: nothing is exposed.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import trainer as program
from huggingface_hub import HfApi, Volume, get_token

from grpo_colab.hub_jobs import IMAGE, LABEL, cancel_jobs, understood

HERE = Path(__file__).resolve().parent


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                usage="start.py --bucket OWNER/NAME [options] [-- options of trainer.py]")
    p.add_argument("--bucket", metavar="OWNER/NAME", help="a Storage Bucket; made, private, if it is not there")
    p.add_argument("--tag", default="grpo-1", help="name of the run, and of its network group (%(default)s)")
    p.add_argument("--replicas", type=int, default=2, help="servers, a Job each (%(default)s)")
    p.add_argument("--flavor", default="h200", help="hardware of the trainer, and of each replica (%(default)s)")
    p.add_argument("--timeout", default="4h", help="after which all end, whatever happened (%(default)s)")
    p.add_argument("--namespace", help="user or organisation that pays; otherwise the bucket's owner")
    p.add_argument("--stop", metavar="TAG", help="cancel the Jobs of a run")
    p.add_argument("--dry-run", action="store_true", help="print all Jobs, start nothing")
    return p


def payer(a): return a.namespace or a.bucket.split("/")[0]


def options(a, more):
    "Of trainer.py."
    said = dict(bucket=a.bucket, tag=a.tag, group=a.tag, namespace=payer(a), replicas=a.replicas, flavor=a.flavor,
                timeout=a.timeout, out=f"/bucket/{a.tag}")
    return [x for k, v in said.items() for x in (f"--{k}", str(v))] + more


def request(a, code, more):
    "The trainer's Job. `code`: what is mounted at /code."
    install = "pip install -q /code/*.whl math-verify && exec python3 /code/trainer.py \"$@\""
    return dict(image=IMAGE, command=["bash", "-c", install, "trainer", *options(a, more)], flavor=a.flavor, timeout=a.timeout,
                secrets=dict(HF_TOKEN=get_token() or ""), labels={LABEL: a.tag, "name": f"{a.tag}-trainer"}, network_group=a.tag,
                network_aliases=["trainer"], volumes=[code, Volume(type="bucket", source=a.bucket, mount_path="/bucket")])


def upload(api, namespace):
    "This checkout's package and trainer.py, as a volume."
    with tempfile.TemporaryDirectory() as d:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", d, str(HERE.parent.parent)]
        subprocess.run(build, check=True)
        (Path(d)/"trainer.py").write_bytes((HERE/"trainer.py").read_bytes())
        return api.sync_job_volume(d, "/code", remote_name="grpo_colab", namespace=namespace)


def price(api, flavor):
    "Dollars an hour, as the Hub says today."
    found = {h.name: h for h in api.list_jobs_hardware()}[flavor]
    return found.unit_cost_usd * dict(second=3600, minute=60, hour=1)[found.unit_label]


def show(a, more):
    "All requests, without secrets."
    code = Volume(type="bucket", source=f"{a.bucket.split('/')[0]}/jobs-artifacts", mount_path="/code", path="grpo_colab")
    mine = understood(HfApi.run_job, request(a, code, more)) | dict(secrets={"HF_TOKEN": "…"})
    replicas = program.requests(program.parser().parse_args(options(a, more)))
    print(json.dumps([mine, *replicas], indent=1, default=lambda volume: volume.to_dict()))


def stop(api, tag, namespace):
    "The trainer first, or it would see its replicas fail. What cannot be cancelled does not keep the others."
    wrong = []
    for t in (tag, f"{tag}-replicas"):
        try: print(f"{t}: cancelled {len(cancel_jobs(t, namespace, api))} Jobs")
        except RuntimeError as e: wrong.append(f"{t}: {e}")
    if wrong: sys.exit("\n".join(wrong))


def main(argv=None, api=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    own, more = (argv[:argv.index("--")], argv[argv.index("--") + 1:]) if "--" in argv else (argv, [])
    a, api = parser().parse_args(own), api or HfApi()
    if not a.stop and not a.bucket: parser().error("--bucket OWNER/NAME, or --stop TAG")
    if a.dry_run: return show(a, more)
    if a.stop: return stop(api, a.stop, payer(a) if a.namespace or a.bucket else api.whoami()["name"])
    namespace = payer(a)
    program.parser().parse_args(options(a, more))  # a wrong option is said here, not in a Job
    hour = price(api, a.flavor)
    print(f"{1 + a.replicas} Jobs on {a.flavor}: ${(1 + a.replicas) * hour:.2f} an hour, for at most {a.timeout} each")
    api.create_bucket(a.bucket, private=True, exist_ok=True)
    job = api.run_job(**understood(api.run_job, request(a, upload(api, namespace), more)), namespace=namespace)
    print(f"trainer: {job.url}\nstop it with: python {Path(__file__).name} --stop {a.tag} --namespace {namespace}")


if __name__ == "__main__": main()
