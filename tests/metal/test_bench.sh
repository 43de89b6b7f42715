# bml on the stand-ins: the program's own view of the Metal backend.
. "$SOURCE_DIR/tests/cli/common.sh"

tiny=$TEST_DATA/variants/heads-of-64
works bench -m "$tiny" --backend metal -p 9 -n 3 -r 1 --json
grep -Eq "\"backend\": \"metal\".*\"read_gb_s\": .*\"device_ms_per_step\": $number.*\"gb_s\": $number, \"percent_of_bandwidth\": $number" out ||
    fail "bench --json on metal does not tell bandwidth and the device's time"
works bench -m "$tiny" --backend metal -p 0 -n 3 -r 1
grep -Eq "of these $number ms on the device: $number GB/s, [0-9]+%" out || fail "no time on the device"
works bench -m "$tiny" --backend metal -p 9 -n 3 -r 1 --profile trace.json
grep -q "^  attention_cached  *[0-9]* calls" out || fail "no profile on metal"
works bench -m "$tiny" --backend cpu -p 0 -n 3 -r 1
! grep -q "on the device" out || fail "the CPU tells of a device"

works generate --backend metal -p "Once upon a time" -n 3 --greedy --json
grep -q '"backend": "metal"' out || fail "generate does not run on metal"
cp out metal.json
works generate --backend cpu -p "Once upon a time" -n 3 --greedy --json
ids() { sed 's/.*"ids": \(\[[^]]*\]\).*/\1/' "$1"; }
[ "$(ids metal.json)" = "$(ids out)" ] || fail "metal and cpu choose different tokens"
