package engine_test

import (
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/engine"
)

// C56: the values are stored and shared by nodes of all versions and
// platforms. They were computed by another implementation.
func TestGroupHashGolden(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		key  string
		want uint64
	}{
		{"", 0x77e80fb05d4c9493},
		{"a", 0x415154ac54df672d},
		{"b", 0x373399443b256968},
		{"orders", 0x192907deda6d6adc},
		{"customer-4711", 0x39584e28d4535b0c},
		{"ü", 0x4d47d1d55504fe90},
		{"日本語", 0x708a8c5661936874},
		{"\x00", 0x5c81a569b82b7afd},
		{strings.Repeat("x", 3000), 0x3b835eec8ebb5357},
	} {
		if got := engine.GroupHash(c.key); got != c.want {
			t.Errorf("GroupHash(%.20q) = %#016x, want %#016x", c.key, got, c.want)
		}
	}
}

// C56: on platforms with an int of 32 bits, too.
func TestPartitionRange(t *testing.T) {
	t.Parallel()
	for range 1_000_000 {
		key, n := strconv.FormatUint(rand.Uint64(), 36), rand.IntN(10_000)+1
		hash := engine.GroupHash(key)
		if hash > math.MaxInt64 {
			t.Fatalf("the hash of %q does not fit a signed integer", key)
		}
		if p := engine.Partition(hash, n); p < 0 || p >= n {
			t.Fatalf("key %q, %d partitions: partition %d", key, n, p)
		}
	}
	for _, c := range []struct {
		hash    uint64
		n, want int
	}{
		{0, 1, 0},
		{0, 7, 0},
		{math.MaxInt64, 10_000, 5807},
		{math.MaxUint64, 10_000, 1615},
		{1 << 63, 3, 2},
		{1 << 32, 10, 6},
		{math.MaxUint32, 16, 15},
		{1<<31 + 1, 7, 3},
	} {
		if got := engine.Partition(c.hash, c.n); got != c.want {
			t.Errorf("Partition(%d, %d) = %d, want %d", c.hash, c.n, got, c.want)
		}
	}
}

// C56: short, similar keys are what people have, and must not fall together.
func TestPartitionSpread(t *testing.T) {
	t.Parallel()
	const keys = 64_000
	for _, n := range []int{2, 3, 8, 16, 64} {
		counts := make([]int, n)
		for i := range keys {
			counts[engine.Partition(engine.GroupHash("user-"+strconv.Itoa(i)), n)]++
		}
		for p, got := range counts {
			if even := keys / n; got < even*8/10 || got > even*12/10 {
				t.Errorf("%d partitions: %d of %d keys are in partition %d", n, got, keys, p)
			}
		}
	}
}

func TestOrderingString(t *testing.T) {
	t.Parallel()
	for o, want := range map[engine.Ordering]string{
		engine.ByGroup: "by_group", engine.Total: "total", engine.None: "none", 99: "unknown",
	} {
		if got := o.String(); got != want {
			t.Errorf("Ordering(%d) is %q, want %q", o, got, want)
		}
	}
}

// C24
func TestWakeRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		outboxes := rapid.SliceOfNDistinct(rapid.StringN(1, 50, 3000), 1, 5, rapid.ID).Draw(t, "outboxes")
		w := engine.Wake{Outbox: rapid.SampledFrom(outboxes).Draw(t, "outbox"), All: rapid.Bool().Draw(t, "all")}
		if !w.All {
			w.Hash = rapid.Uint64().Draw(t, "hash")
		}
		payload := engine.EncodeWake(w)
		if len(payload) != 32 {
			t.Fatalf("the payload has %d bytes", len(payload))
		}
		if got, ok := engine.DecodeWake(payload, outboxes); !ok || got != w {
			t.Fatalf("%+v became %+v, %v", w, got, ok)
		}
		if got, ok := engine.DecodeWake(payload, []string{"another outbox"}); ok {
			t.Fatalf("a wake of another outbox became %+v", got)
		}
	})
}

// C24: whoever may write to the channel cannot disturb.
func TestDecodeWakeOfAnything(t *testing.T) {
	t.Parallel()
	outboxes := []string{"orders"}
	head := engine.EncodeWake(engine.Wake{Outbox: "orders"})[:16]
	for _, payload := range []string{
		"", "*", "orders", strings.Repeat("g", 32), strings.Repeat("f", 31), strings.Repeat("0", 33),
		head + strings.Repeat("x", 16), head + strings.Repeat(" ", 16), head + "-000000000000001", head,
	} {
		if w, ok := engine.DecodeWake(payload, outboxes); ok {
			t.Errorf("%q became %+v", payload, w)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		payload := rapid.String().Draw(t, "payload")
		if w, ok := engine.DecodeWake(payload, outboxes); ok && w.Outbox != "orders" {
			t.Fatalf("%q became %+v", payload, w)
		}
	})
}

func TestPushStateString(t *testing.T) {
	t.Parallel()
	for s, want := range map[engine.PushState]string{
		engine.Polling: "polling", engine.Degraded: "degraded", engine.Push: "push",
	} {
		if got := s.String(); got != want {
			t.Errorf("PushState(%d) is %q, want %q", s, got, want)
		}
	}
}
