# The short way in. Everything here is a thin front for CMake: see CMakePresets.json.

BUILD = build
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 10
# CMake runs make below this one, which would announce every directory.
MAKEFLAGS += --no-print-directory
STORY = generate --echo -p "Once upon a time" -n 250 --temperature 0.8 --top-k 40 --ignore-eos

.PHONY: all run test bench bench-kernels install asan metal fuzz portability format clean

all: $(BUILD)/bml

# Writes a story with the built-in model.
run: all
	@$(BUILD)/bml $(STORY)

# Builds and runs every test.
test:
	@sh tools/dependencies.sh tests
	cmake --preset release -DBML_TESTS=ON >/dev/null
	cmake --build --preset release -j $(JOBS)
	ctest --preset release

bench: all
	$(BUILD)/bml bench

# Each kernel alone.
bench-kernels: all
	@cmake --build --preset release -j $(JOBS) --target bench_kernels
	$(BUILD)/bench_kernels

install: all
	cmake --install $(BUILD) --prefix $(PREFIX)

# The whole suite under AddressSanitizer and UndefinedBehaviorSanitizer.
asan:
	@sh tools/dependencies.sh tests
	cmake --preset asan >/dev/null
	cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS)

# The Metal backend on stand-ins for Metal and its shading language, under the same sanitizers.
metal:
	@sh tools/dependencies.sh metal
	cmake --preset metal >/dev/null
	cmake --build --preset metal -j $(JOBS)
	ctest --preset metal -j $(JOBS)

# Every fuzz target for FUZZ_SECONDS each, from its committed corpus.
fuzz:
	@sh tools/dependencies.sh fuzz
	cmake --preset fuzz >/dev/null
	cmake --build --preset fuzz -j $(JOBS) --target fuzzers
	@sh tests/fuzz/run.sh $(BUILD)/fuzz/tests $(FUZZ_SECONDS)

# Older x86-64 processors and 64-bit Arm, under qemu; on x86-64 Debian.
portability:
	@sh tools/dependencies.sh portability
	cmake --preset release -DBML_TESTS=ON >/dev/null
	cmake --build --preset release -j $(JOBS)
	cmake --preset aarch64 >/dev/null
	cmake --build --preset aarch64 -j $(JOBS)
	@sh tests/portability/run.sh $(BUILD) $(BUILD)/aarch64

format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.m' '*.metal')

clean:
	rm -rf $(BUILD)

$(BUILD)/CMakeCache.txt:
	@sh tools/dependencies.sh build
	cmake --preset release -DBML_TESTS=OFF >/dev/null

# Always asks CMake, which knows what is out of date.
$(BUILD)/bml: $(BUILD)/CMakeCache.txt FORCE
	@cmake --build --preset release -j $(JOBS) --target bml bml_shared bml_static

.PHONY: FORCE
FORCE:
