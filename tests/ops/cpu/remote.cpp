// The kernels as a program that calls them for another process: remote.py sends a call's arguments
// over a pipe and reads what the kernel wrote. So kernels of another processor, run by an emulator
// of it, stand in the same tests as this one's.
//
// A call: the name, the number of arguments, the arguments. An argument: i and a whole number, d and
// a double, 0 (a null pointer), b and an array's bytes, or s and the words of a struct, which are
// arguments themselves. The answer: the result, and then every array that was an argument.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

namespace {

constexpr int64_t MOST_BYTES = int64_t(1) << 28;

void read_bytes(void *into, size_t size) {
    if (size && std::fread(into, 1, size, stdin) != size) std::exit(0);  // the other side is gone
}

int64_t read_number() {
    int64_t number;
    read_bytes(&number, sizeof number);
    return number;
}

int64_t read_size() {
    int64_t size = read_number();
    if (size < 0 || size > MOST_BYTES) {
        std::fprintf(stderr, "a size of %lld\n", (long long)size);
        std::exit(2);
    }
    return size;
}

struct Argument {
    char kind = 0;
    int64_t whole = 0;
    double real = 0;
    std::unique_ptr<char[]> bytes;
    int64_t size = 0;
    std::vector<Argument> words;
};

int64_t word_of(const Argument &a) {
    int64_t word = a.whole;
    if (a.kind == 'd') memcpy(&word, &a.real, sizeof word);
    if (a.kind == 'b' || a.kind == 's') word = int64_t(a.bytes.get());
    return word;
}

Argument read_argument() {
    Argument a;
    read_bytes(&a.kind, 1);
    if (a.kind == 'i') a.whole = read_number();
    if (a.kind == 'd') read_bytes(&a.real, sizeof a.real);
    if (a.kind == 'b') {
        a.size = read_size();
        a.bytes.reset(new char[a.size + 1]);
        read_bytes(a.bytes.get(), a.size);
    }
    if (a.kind == 's') {
        int64_t count = read_size();
        a.bytes.reset(new char[8 * count]);
        for (int64_t i = 0; i < count; i++) {
            a.words.push_back(read_argument());
            int64_t word = word_of(a.words.back());
            memcpy(a.bytes.get() + 8 * i, &word, 8);
        }
    }
    return a;
}

template <class T>
T value_of(const Argument &a) {
    if constexpr (std::is_pointer<T>::value)
        return T(a.bytes.get());
    else if constexpr (std::is_floating_point<T>::value)
        return T(a.real);
    else
        return T(a.whole);
}

using Arguments = std::vector<Argument>;
using Function = std::function<int64_t(const Arguments &)>;

template <class R, class... A, size_t... I>
Function wrapped(R (*f)(A...), std::index_sequence<I...>) {
    return [f](const Arguments &given) -> int64_t {
        if (given.size() != sizeof...(A)) std::exit(3);
        if constexpr (std::is_void<R>::value) {
            f(value_of<A>(given[I])...);
            return 0;
        } else {
            return f(value_of<A>(given[I])...);
        }
    };
}

template <class R, class... A>
Function wrap(R (*f)(A...)) {
    return wrapped(f, std::index_sequence_for<A...>());
}

#define NAMED(f) {#f, wrap(f)}
const std::map<std::string, Function> FUNCTIONS = {
    NAMED(rq_threads),      NAMED(rq_add_norm),       NAMED(rq_linear),       NAMED(rq_mlp),
    NAMED(rq_mla_prologue), NAMED(rq_mla_absorbed),   NAMED(rq_gqa_prologue), NAMED(rq_gqa_decode),
    NAMED(rq_causal),       NAMED(rq_route),          NAMED(rq_experts),      NAMED(rq_linear_packed),
    NAMED(rq_uniform),      NAMED(rq_experts_packed), NAMED(rq_distribution), NAMED(rq_draw),
    NAMED(rq_draw_rest),    NAMED(rq_draw_normal),    NAMED(rq_write_probs),  NAMED(rq_mlp_packed),
    NAMED(rq_mla_prologue_packed), NAMED(rq_embed),      NAMED(rq_concat_columns),    NAMED(rq_add),
};

}  // namespace

int main(int, char **arguments) {
    if (const char *word = lacking()) {
        std::fprintf(stderr, "%s: this processor has no %s\n", arguments[0], word);
        return 4;
    }
    for (;;) {
        std::string name(read_size(), ' ');
        read_bytes(&name[0], name.size());
        Arguments given(read_size());
        for (Argument &a : given) a = read_argument();
        int64_t result = FUNCTIONS.at(name)(given);
        std::fwrite(&result, sizeof result, 1, stdout);
        for (const Argument &a : given)
            if (a.kind == 'b') std::fwrite(a.bytes.get(), 1, a.size, stdout);
        std::fflush(stdout);
    }
}
