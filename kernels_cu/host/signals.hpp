// Signal handlers during a launch: Ctrl-C (SIGINT), and a kernel's bad address or integer division by zero.
#pragma once

#include <signal.h>
#include <stdint.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "block.hpp"
#include "fiber.hpp"
#include "report.hpp"

namespace fa_host {

constexpr int handled_signals[] = {SIGINT, SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction previous[4];  // the handlers installed before the launch

// Ctrl-C asks the launch to end, then calls the previous handler (Python's). A second one ends the process: the launch did not end.
// One within 0.3 s is taken for the same Ctrl-C sent twice.
static inline void on_interrupt(int number, siginfo_t* info, void* context) {
    static timespec first;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!interrupt_requested) first = now;
    else if (now.tv_sec - first.tv_sec + (now.tv_nsec - first.tv_nsec) * 1e-9 > 0.3) _exit(130);
    interrupt_requested = 1;
    previous[0].sa_flags& SA_SIGINFO ? previous[0].sa_sigaction(number, info, context) : previous[0].sa_handler(number);
}

// A fault in a kernel is reported and ends the launch. Any other fault, also one in the report itself, is left to the previous handler.
static inline void on_fault(int number, siginfo_t* info, void* context) {
    if (!this_worker || this_worker->faulted) {
        for (int i = 0; i < 4; ++i)
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
    begin_report(*this_worker, number == SIGFPE ? "integer division by zero" : "illegal memory access");
    print(": thread %d at pc:%p", this_worker->current, return_address);
    if (number != SIGFPE) print(", address %p", info->si_addr);
    print("\n");
    end_report(*this_worker);
}

static inline void install_handlers() {
    interrupt_requested = 0;
    for (int i = 0; i < 4; ++i) {
        struct sigaction old, ours = {};
        ours.sa_sigaction = i ? on_fault : on_interrupt;
        ours.sa_flags = SA_SIGINFO | (i ? SA_NODEFER : SA_RESTART);
        sigaction(handled_signals[i], nullptr, &old);
        if (old.sa_sigaction != ours.sa_sigaction) previous[i] = old;  // they are ours in a child forked during a launch
        bool handled = previous[i].sa_handler != SIG_DFL && previous[i].sa_handler != SIG_IGN;
        if (i ? !__sanitizer_start_switch_fiber : handled) sigaction(handled_signals[i], &ours, nullptr);
    }
}

static inline void restore_handlers() {
    for (int i = 0; i < 4; ++i) sigaction(handled_signals[i], &previous[i], nullptr);
}

}  // namespace fa_host
