"""Questions that a login node cannot answer: one per key, with the command that answers it and its flag."""

from __future__ import annotations

import shlex

from hpcjobs.discovery.facts import ClusterFacts
from hpcjobs.discovery.proposal import Answers, Question
from hpcjobs.discovery.software import modules_of


def list_questions(cluster: ClusterFacts, answers: Answers, *, python: str) -> tuple[Question, ...]:
    """The questions that neither the cluster nor the user has answered; ``python`` runs hpcjobs here."""
    questions = []
    if answers.interface is None:
        questions.append(
            Question("interface", "Which network interface of a node is the fast one?",
                     "srun -N1 -t 1 ip -brief address", "--interface NAME")
        )  # fmt: skip
    if not answers.modules and cluster.modules is not None:
        mpi = modules_of("MPI", cluster.modules.names)
        known = f" (MPI here: {', '.join(mpi[:3])})" if mpi else ""
        questions.append(
            Question("modules", f"Which modules does a program need{known}?", "module avail", "--module NAME")
        )
    if answers.conda is None and answers.venv is None:
        questions.append(
            Question("environment", "Do the nodes have the Python that runs hpcjobs here? If not: a conda environment "
                     "or venv that they have.", f"srun -N1 -t 1 {shlex.quote(python)} -c 'import hpcjobs'",
                     "--conda NAME or --venv FOLDER")
        )  # fmt: skip
    if answers.scratch is None:
        tmp_fs = f" Slurm's TmpFS is {cluster.config.tmp_fs}." if cluster.config.tmp_fs is not None else ""
        questions.append(
            Question("scratch", f"Where is the scratch of a node for a job?{tmp_fs}",
                     "srun -N1 -t 1 sh -c 'echo $TMPDIR; df -h /tmp /scratch /local'", "--scratch FOLDER")
        )  # fmt: skip
    if answers.run_root is None:
        questions.append(
            Question("run_root", "Which folder do all nodes see that is fast and large? Without it, runs/ in the "
                     "current folder.", "df -h ~ \"${SCRATCH-}\" \"${WORK-}\"", "--run-root FOLDER")
        )  # fmt: skip
    questions += _accounting_questions(cluster, answers)
    if answers.container_runtime is None and not cluster.runtimes:
        questions.append(
            Question("containers", "Do the nodes have a container runtime?",
                     "srun -N1 -t 1 sh -c 'command -v apptainer singularity enroot'", "--container-runtime NAME")
        )  # fmt: skip
    if answers.login is None:
        questions.append(
            Question("login", "By which name do you reach this login node from outside?", "hostname --fqdn",
                     "--login HOST")
        )  # fmt: skip
    return tuple(questions)


def _accounting_questions(cluster: ClusterFacts, answers: Answers) -> list[Question]:
    questions = []
    if answers.mpi is None and cluster.mpi_types is None:
        questions.append(Question("mpi", "Which MPI type does srun have?", "srun --mpi=list", "--mpi TYPE"))
    if not cluster.accounting.associations and answers.account is None and cluster.config.enforces:
        command = "sacctmgr show associations user=$USER format=account,qos,defaultqos"
        questions.append(
            Question("defaults.account", "Which account and QOS do your jobs need? sacctmgr did not show them.",
                     command, "--account NAME, --qos NAME")
        )  # fmt: skip
    return questions
