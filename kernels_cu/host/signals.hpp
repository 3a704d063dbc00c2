// Signal handlers during a launch: Ctrl-C (SIGINT), and a kernel's bad address, integer division by zero or trap. They run on a stack of
// their own (workers.hpp), for a fiber's may be what has overflowed.
#pragma once

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "block.hpp"
#include "fiber.hpp"
#include "report.hpp"

namespace fa_host {

constexpr int handled_signals[] = {SIGINT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}, handlers = 6;
static struct sigaction previous[handlers];  // the handlers installed before the launch

// Ctrl-C asks the launch to end, then calls the previous handler (Python's). A second one ends the process: the launch did not end, as
// in a loop without a barrier. On a terminal the first one says so, as nothing else might. One within 0.3 s is the same one sent twice.
static inline void on_interrupt(int number, siginfo_t* info, void* context) {
    static timespec first;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    auto say = [](const char* text, size_t letters) { (void)!write(2, text, letters); };
    constexpr char again[] = "\ninterrupted; again to end at once\n", end[] = "error: interrupted\n";
    if (!interrupt_requested) {
        first = now;
        const int kept = errno;
        if (isatty(2)) say(again, sizeof again - 1);
        errno = kept;
    } else if (now.tv_sec - first.tv_sec + (now.tv_nsec - first.tv_nsec) * 1e-9 > 0.3) {
        say(end, sizeof end - 1);
        _exit(130);
    }
    interrupt_requested = 1;
    previous[0].sa_flags& SA_SIGINFO ? previous[0].sa_sigaction(number, info, context) : previous[0].sa_handler(number);
}

// A fault in a kernel is reported and ends the launch. One in the report itself, as where the kernel has overwritten the engine, ends the
// process. Any other is left to the previous handler.
static inline void on_fault(int number, siginfo_t* info, void* context) {
    if (this_worker && this_worker->faulted) {
        constexpr char text[] =
            "error: a kernel crashed the CPU engine\nit has overwritten memory that is not its own\nhint: fa-cli run --check asan names the line\n";
        (void)!write(2, text, sizeof text - 1);
        _exit(5);
    }
    if (!this_worker) {
        for (int i = 0; i < handlers; ++i)
            if (handled_signals[i] == number) sigaction(number, &previous[i], nullptr);
        return;  // the faulting instruction runs again, now under the previous handler
    }
    this_worker->faulted = true;
    auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    auto code = machine.gregs[REG_RIP];
#else
    auto code = machine.pc;
#endif
    auto return_address = reinterpret_cast<void*>(code + 1);  // what reports expect: it lies after the instruction
    Worker& w = *this_worker;
    auto address = static_cast<char*>(info->si_addr);
    bool of_memory = number == SIGSEGV || number == SIGBUS;
    auto within = [&](char* from, size_t bytes) { return of_memory && address >= from && address < from + bytes; };
    bool of_stacks = within(w.stacks, size_t(w.stacked) * (w.stack_bytes + w.page_bytes));
    bool of_shared = within(w.room, arena_bytes + 2 * fence_bytes);
    begin_report(w, number == SIGFPE ? "integer division by zero"
                    : !of_memory     ? "trap or illegal instruction"
                    : of_stacks      ? "stack overflow"
                    : of_shared      ? "access outside shared memory"
                                     : "illegal memory access");
    print(": thread %d at pc:%p", w.current, return_address);
    if (of_stacks) print(", which has used its %zu KB stack (recursion, or large local arrays?)", w.stack_bytes >> 10);
    else if (of_shared) print(", byte %td of %u", address - w.arena, w.launch->dynamic_bytes);
    else if (of_memory) print(", address %p", info->si_addr);
    print("\n");
    end_report(w);
}

static inline void install_handlers() {
    interrupt_requested = 0;
    for (int i = 0; i < handlers; ++i) {
        struct sigaction old, ours = {};
        ours.sa_sigaction = i ? on_fault : on_interrupt;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (i ? SA_NODEFER : SA_RESTART);
        sigaction(handled_signals[i], nullptr, &old);
        if (old.sa_sigaction != ours.sa_sigaction) previous[i] = old;  // they are ours in a child forked during a launch
        bool handled = previous[i].sa_handler != SIG_DFL && previous[i].sa_handler != SIG_IGN;
        if (i ? !__sanitizer_start_switch_fiber : handled) sigaction(handled_signals[i], &ours, nullptr);
    }
}

static inline void restore_handlers() {
    for (int i = 0; i < handlers; ++i) sigaction(handled_signals[i], &previous[i], nullptr);
}

}  // namespace fa_host
