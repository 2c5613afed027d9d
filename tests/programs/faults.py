"""What goes wrong in runs that tests start: each function makes its own process die, hang or fail at a certain point.

`tests/programs/forked_runs.py` calls them before the run begins.
"""

import ctypes
import gc
import itertools
import os
import pathlib
import resource
import signal
import socket
import sys
import threading
import time
import traceback

import torch

from gpt_pretrain.checkpoint import save
from gpt_pretrain.features import resolve
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.training import rewind, setup, step, stragglers, trainer, watchdog
from gpt_pretrain.training import run as training_run
from gpt_pretrain.training.dump import named_weights


def end_soon():
    """The watchdog's times from a known death to the end, shortened."""
    watchdog.FOLLOW_S, watchdog.GRACE_S = 3.0, 1.5


def hurry():
    """All of the watchdog's times, shortened; a busy machine may leave a rank without its turn for seconds."""
    end_soon()
    training_run.LEARNING_STEPS = 5
    watchdog.BEAT_S, watchdog.SILENT_S = 0.5, 8.0
    watchdog.TICK_S, watchdog.STEP_FLOOR_S = 0.2, 5.0


def limit(name, amount):
    """As `ulimit` in a job's script: AS bytes of addresses, FSIZE of a file, NOFILE descriptors beside those open."""
    if name == "NOFILE":
        amount += max(int(number) for number in os.listdir("/proc/self/fd"))
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (amount, amount))


def _at_step(number, fault):
    train_step, steps = trainer.train_step, []

    def faulty_step(*arguments, **named):
        steps.append(None)
        if len(steps) == number:
            fault()
        return train_step(*arguments, **named)

    trainer.train_step = faulty_step


def die_at_step(number, noted=None):
    """A file says that it is about to."""

    def die():
        if noted is not None:
            pathlib.Path(noted).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    _at_step(number, die)


def abort_at_step(number):
    """As C++ does for an exception that nobody catches."""

    def abort():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()

    _at_step(number, abort)


def sleep_at_step(number, first_step_s=0):
    """The first step takes `first_step_s` longer."""

    def hang_in_python():
        while True:
            time.sleep(3600)

    _at_step(1, lambda: time.sleep(first_step_s))
    _at_step(number, hang_in_python)


def stop_at_step(number):
    _at_step(number, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def pause_at_step(number, seconds):
    """Stopped, as a suspended job is, and continued."""

    def pause():
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)

    _at_step(number, pause)


def hold_interpreter_at_step(number):
    def hang_in_c():
        # Unlike CDLL, PyDLL does not let other threads run meanwhile. A signal would end a sleep; it ends no wait for a
        # mutex, which is zeros as long as nobody has it.
        mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        for _ in range(2):
            libc.pthread_mutex_lock(mutex)

    _at_step(number, hang_in_c)


def damage_at_step(number, checkpoint):
    """Another bit in the middle of its largest file."""

    def flip():
        path = max(pathlib.Path(checkpoint).glob("*.distcp"), key=lambda each: each.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    _at_step(number, flip)


def die_in_save(number):
    """Killed before the given operation on a checkpoint's files or directories, counted over all saves of the run."""
    operations = []

    def count(event, arguments):
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if changes and any("/checkpoints/" in str(argument) for argument in arguments):
            operations.append(event)
            if len(operations) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def die_in_rewind(number):
    """Killed before the given operation on files or directories with which the run's first rewind decides."""
    take_back = rewind.take_back

    def die_in_it(*arguments, **keywords):
        die_in_save(number)
        return take_back(*arguments, **keywords)

    rewind.take_back = die_in_it


def hold_saves():
    """Nothing of a checkpoint is written before the loop waits for it."""
    write, wait, wanted = save.write_checkpoint, save.CheckpointSaver.wait, threading.Event()

    def write_late(*arguments):
        assert wanted.wait(60)
        return write(*arguments)

    def wait_for(saver):
        wanted.set()
        try:
            return wait(saver)
        finally:
            wanted.clear()

    save.write_checkpoint, save.CheckpointSaver.wait = write_late, wait_for


def fail_saves(steps):
    """The disk is full whenever these steps are saved."""
    write = save.write_checkpoint

    def fail(destination, *arguments):
        if destination.step in steps:
            raise OSError(28, "No space left on device", str(destination.unfinished))
        return write(destination, *arguments)

    save.write_checkpoint = fail


def fail_at_step(number, awaited=None):
    """Not before there is such a file."""

    def fail():
        while awaited is not None and not pathlib.Path(awaited).exists():
            time.sleep(0.01)
        raise RuntimeError("a fault of the test")

    _at_step(number, fail)


def run_out_of_memory_at_step(number):
    def run_out():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")

    _at_step(number, run_out)


def _poison(steps, name, spoil, *, of_inputs=False):
    """From the first to the last of the steps (null: to the end) a module's results go through `spoil`, here alone."""
    train_step, done, handles = trainer.train_step, [], []
    first, last = steps

    def poisoned_step(trainable, *arguments, **named):
        done.append(None)
        if len(done) == first:
            for chunk in trainable.model.gpt_chunks:
                module = dict(whole_model_modules(chunk)).get(name)
                if module is not None and of_inputs:
                    handles.append(module.register_forward_pre_hook(lambda module, inputs: _spoiled(inputs, spoil)))
                elif module is not None:
                    handles.append(module.register_forward_hook(lambda module, inputs, result: _spoiled(result, spoil)))
        result = train_step(trainable, *arguments, **named)
        if len(done) == last:
            for handle in handles:
                handle.remove()
        return result

    trainer.train_step = poisoned_step


def _spoiled(result, spoil):
    # megatron-core's linear layers return their bias beside the product.
    return (spoil(result[0]), *result[1:]) if isinstance(result, tuple) else spoil(result)


def poison_result(steps, name, value):
    _poison(steps, name, lambda tensor: tensor * float(value) if torch.is_grad_enabled() else tensor)


def poison_gradient(steps, name, value):
    def spoil(tensor):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient * float(value))
        return tensor

    _poison(steps, name, spoil)


def _in_passes(action):
    def act(tensor):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: action())
        return tensor

    _poison([1, None], "decoder.layers.0", act)


def sleep_in_passes(seconds):
    """A slow host of a GPU: each backward pass through the first layer takes so much longer."""
    _in_passes(lambda: time.sleep(seconds))


def spin_in_passes(seconds):
    """A slow processor: the same, at work."""

    def spin():
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    _in_passes(spin)


def spin_on_gpu_in_passes(cycles):
    """A slow GPU: the same in cycles of its clock, while its host goes on."""
    _in_passes(lambda: torch.cuda._sleep(cycles))


def on_host(name):
    """What asks for the host's name hears this one."""
    socket.gethostname = lambda: name


def judge_soon(seconds):
    """Ranks are judged slow or not after a shorter time."""
    stragglers.LEAST_S = seconds


def poison_input(steps, name, value):
    """As `_poison`, of the module's inputs."""
    _poison(steps, name, lambda tensor: tensor * float(value) if torch.is_grad_enabled() else tensor, of_inputs=True)


class _Renumbered:
    """Training samples under other numbers."""

    def __init__(self, dataset, number):
        self.dataset, self.number, self.num_epochs = dataset, number, dataset.num_epochs
        self.epochs, self.consumed = dataset.epochs, dataset.consumed
        self.attended, self.sequence_length_at = dataset.attended, dataset.sequence_length_at

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[self.number(index)]


def _renumber_samples(number):
    build = setup.build_datasets

    def renumbered(*arguments, **options):
        training, validation = build(*arguments, **options)
        return _Renumbered(training, number), validation

    setup.build_datasets = renumbered


def note_samples(path):
    """Each training sample that is read becomes a line of a file."""

    def note(index):
        with open(path, "a") as file:
            file.write(f"{index}\n")
        return index

    _renumber_samples(note)


def note_collections(path):
    """Each scheduled garbage collection becomes a line of a file: how many objects it visits.

    A new process has frozen none; a fork's parent has.
    """
    gc.unfreeze()

    def note(phase, info):
        if phase == "start" and not gc.isenabled():
            num_objects = len(gc.get_objects())
            with open(path, "a") as file:
                file.write(f"{num_objects}\n")

    gc.callbacks.append(note)


def leave_out_samples(first, num_samples):
    """The data are what they would be without these."""
    _renumber_samples(lambda index: index if index < first else index + num_samples)


def poison_samples(first, num_samples, name, value):
    """A module's results go wrong in every training step on these samples, whenever that is."""
    read = []

    def note(index):
        read[:] = [index]
        return index

    _renumber_samples(note)
    poisoned = range(first, first + num_samples)
    _poison(
        [1, None], name, lambda tensor: tensor * value if torch.is_grad_enabled() and read[0] in poisoned else tensor
    )


def poison_weight(step, name):
    """One number of a weight becomes NaN, and stays so."""
    train_step, done = trainer.train_step, []

    def poisoned_step(trainable, *arguments, **named):
        done.append(None)
        if len(done) == step:
            for chunk in trainable.model.gpt_chunks:
                weights = dict(named_weights(chunk))
                if name in weights:
                    weights[name].data.view(-1)[3] = torch.nan
        return train_step(trainable, *arguments, **named)

    trainer.train_step = poisoned_step


def signal_at_step(number, name, noted=None):
    """A file's time says when."""

    def send():
        if noted is not None:
            pathlib.Path(noted).touch()
        os.kill(os.getpid(), getattr(signal, name))

    _at_step(number, send)


def signal_at_start(name):
    """Before there is a model."""
    prepare = training_run.prepare_corpus

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), getattr(signal, name))
        return prepare(*arguments, **options)

    training_run.prepare_corpus = interrupted


def signals_in_save(names):
    """One at each operation on a checkpoint's files, from the first on, over and over."""
    left = itertools.cycle(names)

    def send(event, arguments):
        if event in ("open", "os.mkdir", "os.rename") and "/checkpoints/" in str(arguments[0]):
            os.kill(os.getpid(), getattr(signal, next(left)))

    sys.addaudithook(send)


def note_files_to_the_loss(path):
    """The package's files on the stack when the first microbatch's loss is computed, the outermost first."""
    summed_loss, package = step.summed_loss, pathlib.Path(step.__file__).parents[1]

    def noting(*arguments):
        if not pathlib.Path(path).exists():
            files = [pathlib.Path(frame.filename) for frame in traceback.extract_stack()]
            inside = [str(file.relative_to(package)) for file in files if file.is_relative_to(package)]
            pathlib.Path(path).write_text("\n".join(dict.fromkeys(inside)))
        return summed_loss(*arguments)

    step.summed_loss = noting


def count_run_specs(path):
    """A line for each time that the run is resolved, with the function that asks."""
    build = resolve.build_run_spec

    def counting(*arguments):
        with pathlib.Path(path).open("a") as file:
            file.write(f"{sys._getframe(1).f_code.co_qualname}\n")
        return build(*arguments)

    for module in list(sys.modules.values()):
        if getattr(module, "build_run_spec", None) is build:
            module.build_run_spec = counting
