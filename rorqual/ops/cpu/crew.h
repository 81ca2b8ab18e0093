// How many threads a call uses now. Where another program runs on a thread's processor, all threads wait for that one at the end of every
// call, or before the next one may begin, a time slice of some milliseconds each time, and a decode step has hundreds of calls. So callers
// note how long they wait. Where that is a good part of the calls' time, they use one thread less for a while. Results do not depend on the
// number of threads.
class Crew {
    // nanoseconds
    static constexpr int64_t WINDOW = 20'000'000;  // of calls, looked at together
    static constexpr int64_t PATIENCE = 50'000;  // waits up to this are those of threads that all run
    static constexpr int64_t FIRST_PAUSE = 200'000'000, LONGEST_PAUSE = 3'200'000'000;  // until one more thread is tried again

    std::atomic<int> fewer{0};
    std::atomic<int64_t> spent{0}, waited{0};  // of the window
    std::atomic<int64_t> until{0}, pause{FIRST_PAUSE};
    std::atomic<bool> trial{false};  // this window has a thread more than the one before

    void begin(bool tries) {
        spent = waited = 0;
        trial = tries;
    }

public:
    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    void all() { fewer = 0; }

    int size(int most) {
        int less = fewer.load(std::memory_order_relaxed);
        if (less == 0) return most;
        int64_t time = now();
        if (time >= until) {
            fewer = --less;
            until = time + pause;
            begin(true);
        }
        return std::max(1, most - less);
    }

    // A call by up to `most` threads, whose caller began its own part at `began` and was through at `done`.
    void note(int most, int64_t start, int64_t began, int64_t done) {
        int64_t end = now(), idle = began - start + end - done;
        spent += end - start;
        if (idle > PATIENCE) waited += idle;
        if (spent < WINDOW) return;
        if (4 * waited > spent && fewer < most - 1) {
            pause = trial ? std::min(2 * pause, LONGEST_PAUSE) : FIRST_PAUSE;
            fewer++;
            until = end + pause;
        }
        begin(false);
    }
};
