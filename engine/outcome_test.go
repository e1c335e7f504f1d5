package engine

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/backoff"
)

// named is a BatchError of errors by message number, 1 the first.
func named(failed map[int64]error) *BatchError { return &BatchError{Failed: failed} }

func TestJudge(t *testing.T) {
	t.Parallel()
	strict := OutboxConfig{Ordering: ByGroup}
	names := []string{"a:1", "b:1", "a:2", "3"}
	withOutage := named(map[int64]error{1: errBroken, 2: ErrNotAttempted})
	withOutage.Outage = errBroken
	var typedNil *BatchError
	for name, c := range map[string]struct {
		config            OutboxConfig
		err               error
		delivered, failed string
		outage            bool
	}{
		"all delivered":          {strict, nil, "a:1 b:1 a:2 3", "", false},
		"a batch error of none":  {strict, &BatchError{}, "a:1 b:1 a:2 3", "", false},
		"a typed nil":            {strict, typedNil, "a:1 b:1 a:2 3", "", false},
		"any other error":        {strict, errBroken, "", "", true},
		"named":                  {strict, named(map[int64]error{2: errBroken}), "a:1 a:2 3", "b:1", false},
		"wrapped":                {strict, fmt.Errorf("send: %w", named(map[int64]error{2: errBroken})), "a:1 a:2 3", "b:1", false},
		"unknown id":             {strict, named(map[int64]error{99: errBroken}), "a:1 b:1 a:2 3", "", false},
		"nil error named":        {strict, named(map[int64]error{1: nil}), "a:1 b:1 a:2 3", "", false},
		"one charge a group":     {strict, named(map[int64]error{1: errBroken, 3: errBroken}), "b:1 3", "a:1", false},
		"each ungrouped":         {strict, named(map[int64]error{4: errBroken, 2: errBroken}), "a:1 a:2", "b:1 3", false},
		"not attempted":          {strict, named(map[int64]error{1: errBroken, 3: ErrNotAttempted}), "b:1 3", "a:1", false},
		"nothing attempted":      {strict, named(map[int64]error{1: ErrNotAttempted, 2: ErrNotAttempted, 3: ErrNotAttempted, 4: ErrNotAttempted}), "", "", true},
		"with an outage":         {strict, withOutage, "a:2 3", "a:1", true},
		"total: one charge":      {OutboxConfig{Ordering: Total}, named(map[int64]error{2: errBroken, 3: errBroken, 4: errBroken}), "a:1", "b:1", false},
		"none: each for himself": {OutboxConfig{Ordering: None}, named(map[int64]error{1: errBroken, 3: errBroken}), "b:1 3", "a:1 a:2", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			batch := batchOf(names...)
			config := c.config.withDefaults()
			out := config.judge(batch, c.err, time.Now())
			out.want(t, batch, c.delivered, c.failed)
			if (out.outage != nil) != c.outage {
				t.Errorf("outage %v, want %v", out.outage, c.outage)
			}
		})
	}
}

func TestJudgeDeath(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config   OutboxConfig
		attempts int
		age      time.Duration
		err      error
		dead     bool
	}{
		"strict never":               {OutboxConfig{}, 1_000_000, 1000 * time.Hour, errBroken, false},
		"strict, permanent":          {OutboxConfig{}, 5, time.Hour, Permanent(errBroken), false},
		"attempts left":              {OutboxConfig{MaxAttempts: 3}, 1, 0, errBroken, false},
		"last attempt":               {OutboxConfig{MaxAttempts: 3}, 2, 0, errBroken, true},
		"more than the bound":        {OutboxConfig{MaxAttempts: 3}, 7, 0, errBroken, true},
		"permanent at once":          {OutboxConfig{MaxAttempts: 3}, 0, 0, fmt.Errorf("x: %w", Permanent(errBroken)), true},
		"young":                      {OutboxConfig{GiveUpAfter: time.Hour}, 500, time.Hour - 1, errBroken, false},
		"old":                        {OutboxConfig{GiveUpAfter: time.Hour}, 0, time.Hour, errBroken, true},
		"permanent with GiveUpAfter": {OutboxConfig{GiveUpAfter: time.Hour}, 0, 0, Permanent(errBroken), true},
		"young with few attempts":    {OutboxConfig{GiveUpAfter: time.Hour, MaxAttempts: 3}, 1, time.Minute, errBroken, false},
		"retry after, last attempt":  {OutboxConfig{MaxAttempts: 1}, 0, 0, RetryAfter(errBroken, time.Hour), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := time.Now()
			batch := batchOf("a:1")
			batch[0].Attempts, batch[0].DueAt = c.attempts, now.Add(-c.age)
			config := c.config.withDefaults()
			out := config.judge(batch, named(map[int64]error{1: c.err}), now)
			list, other := out.settlement.Failed, out.settlement.Dead
			if c.dead {
				list, other = other, list
			}
			if len(list) != 1 || len(other) != 0 {
				t.Fatalf("failed %v, dead %v; want dead %v", out.settlement.Failed, out.settlement.Dead, c.dead)
			}
			if list[0].ID != 1 || list[0].Attempts != c.attempts || !strings.HasSuffix(list[0].Error, "broken") {
				t.Errorf("failure %+v", list[0])
			}
		})
	}
}

func TestJudgeDelay(t *testing.T) {
	t.Parallel()
	var asked []int
	config := OutboxConfig{Backoff: backoff.Func(func(attempt int) time.Duration {
		asked = append(asked, attempt)
		return time.Duration(attempt) * time.Second
	})}
	batch := batchOf("1", "2", "3", "4")
	batch[1].Attempts = 41
	out := config.judge(batch, named(map[int64]error{
		1: errBroken, 2: errBroken, 3: fmt.Errorf("busy: %w", RetryAfter(errBroken, time.Minute)), 4: RetryAfter(errBroken, -time.Minute),
	}), time.Now())
	want := []time.Duration{time.Second, 42 * time.Second, time.Minute, 0}
	for i, f := range out.settlement.Failed {
		if f.Delay != want[i] {
			t.Errorf("message %d is retried after %v, want %v", f.ID, f.Delay, want[i])
		}
	}
	if fmt.Sprint(asked) != "[1 42]" {
		t.Errorf("the backoff was asked for attempts %v", asked)
	}
}

// C53
func TestJudgePanicOfTheWholeCall(t *testing.T) {
	t.Parallel()
	config := OutboxConfig{}.withDefaults()
	for name, err := range map[string]error{"panic": panicError("x"), "goexit": errGoexit} {
		if out := config.judge(batchOf("1", "2"), err, time.Now()); !out.panicked || out.progress() {
			t.Errorf("%s: %+v, want a panicked outcome that charges nobody", name, out)
		}
	}
	if out := config.judge(batchOf("1"), errBroken, time.Now()); out.panicked {
		t.Error("an ordinary error counts as a panic")
	}
}

func TestJudgeKeeps(t *testing.T) {
	t.Parallel()
	for _, retention := range []Retention{Delete, Keep(time.Hour)} {
		config := OutboxConfig{Retention: retention}.withDefaults()
		if out := config.judge(batchOf("1"), nil, time.Now()); out.settlement.Keep != (retention != Delete) {
			t.Errorf("retention %v: Keep is %v", retention.KeepFor(), out.settlement.Keep)
		}
	}
	if got := Keep(time.Millisecond).KeepFor(); got != time.Second {
		t.Errorf("the least that is kept is %v, want 1s", got)
	}
}

func TestErrorText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want string }{
		{"plain", "plain"},
		{"nul\x00s", "nul\uFFFDs"},
		{"bad \xff\xfe utf8", "bad \uFFFD utf8"},
		{strings.Repeat("x", MaxErrorBytes+1), strings.Repeat("x", MaxErrorBytes)},
		{strings.Repeat("x", MaxErrorBytes-1) + "ü", strings.Repeat("x", MaxErrorBytes-1)},
		{"x" + strings.Repeat("€", MaxErrorBytes), "x" + strings.Repeat("€", (MaxErrorBytes-1)/3)},
	} {
		if got := errorText(errors.New(c.in)); got != c.want {
			t.Errorf("%.20q became %.20q of %d bytes, want %d bytes", c.in, got, len(got), len(c.want))
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.SliceOfN(rapid.Byte(), 0, 2*MaxErrorBytes).Draw(t, "raw")
		got := errorText(errors.New(string(raw)))
		if len(got) > MaxErrorBytes || !utf8.ValidString(got) || strings.ContainsRune(got, 0) {
			t.Fatalf("%q cannot be stored", got)
		}
	})
}

func TestMarkedErrors(t *testing.T) {
	t.Parallel()
	if Permanent(nil) != nil || RetryAfter(nil, time.Second) != nil || Unavailable(nil) != nil {
		t.Error("marking nil gives an error")
	}
	for name, err := range map[string]error{
		"permanent": Permanent(errBroken), "retry after": RetryAfter(errBroken, 1), "unavailable": Unavailable(errBroken),
	} {
		if err.Error() != "broken" || !errors.Is(err, errBroken) {
			t.Errorf("%s: %v hides the error", name, err)
		}
	}
	if IsPermanent(errBroken) || IsUnavailable(errBroken) {
		t.Error("an ordinary error is marked")
	}
	if _, ok := RetryDelay(errBroken); ok {
		t.Error("an ordinary error has a delay")
	}
	if !IsPermanent(RetryAfter(Permanent(errBroken), 1)) {
		t.Error("two marks exclude each other")
	}
}

func TestBatchErrorText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  *BatchError
		want string
	}{
		{named(map[int64]error{7: errBroken, 3: ErrNotAttempted, 9: errBroken}), "outbox: 3 messages not delivered, the first (id 7): broken"},
		{named(map[int64]error{7: ErrNotAttempted}), "outbox: 1 messages not attempted"},
		{&BatchError{Outage: errBroken}, "outbox: 0 messages not delivered: destination unavailable: broken"},
	} {
		if got := c.err.Error(); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	if !errors.Is(&BatchError{Outage: errBroken}, errBroken) {
		t.Error("the outage is hidden")
	}
	var e BatchError
	e.Fail(1, errBroken)
	e.Fail(2, ErrNotAttempted)
	if len(e.Failed) != 2 || !errors.Is(e.Failed[1], errBroken) {
		t.Errorf("Fail recorded %v", e.Failed)
	}
}

func TestDedupID(t *testing.T) {
	t.Parallel()
	env := Envelope{ID: 1 << 62, Installation: "00ff00ff00ff00ff", Outbox: "orders"}
	first := env.DedupID()
	if want := "00ff00ff00ff00ff-orders-4611686018427387904"; first != want {
		t.Errorf("got %q, want %q", first, want)
	}
	env.Attempts, env.LastError, env.Partition = 5, "broken", 3
	if env.DedupID() != first {
		t.Error("a redelivery has another id")
	}
}
