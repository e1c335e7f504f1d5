package backoff_test

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/backoff"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// exponential draws any valid policy, with its fields set.
func exponential(t *rapid.T) backoff.Exponential {
	e := backoff.Exponential{
		Initial:    time.Duration(rapid.Int64Range(1, math.MaxInt64).Draw(t, "initial")),
		Multiplier: rapid.Float64Range(1, 1e9).Draw(t, "multiplier"),
		Jitter:     rapid.OneOf(rapid.Just[float64](backoff.NoJitter), rapid.Float64Range(0.001, 0.999)).Draw(t, "jitter"),
	}
	e.Max = time.Duration(rapid.Int64Range(int64(e.Initial), math.MaxInt64).Draw(t, "max"))
	return e
}

func TestExponentialStaysWithinItsBounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := exponential(t)
		if err := e.Validate(); err != nil {
			t.Fatalf("a valid policy is refused: %v", err)
		}
		attempt := rapid.IntRange(math.MinInt, math.MaxInt).Draw(t, "attempt")
		d := e.Delay(attempt)
		if d < 0 || d > e.Max {
			t.Fatalf("%+v: delay after attempt %d is %v", e, attempt, d)
		}
		jitter := max(0, e.Jitter)
		lowest := float64(e.Initial) * (1 - jitter)
		if ceiling := float64(e.Max) * (1 - jitter) / (1 + jitter); ceiling < lowest {
			lowest = ceiling
		}
		if slack := 1 + lowest*1e-9; float64(d) < lowest-slack {
			t.Fatalf("%+v: delay after attempt %d is %v, below %v", e, attempt, d, time.Duration(lowest))
		}
	})
}

func TestExponentialDelaysGrowUpToMax(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := exponential(t)
		e.Jitter = backoff.NoJitter
		last := e.Delay(1)
		if last != e.Initial && math.Abs(float64(last-e.Initial)) > float64(e.Initial)*1e-9 {
			t.Fatalf("%+v: the first delay is %v", e, last)
		}
		for attempt := 2; attempt < 100; attempt++ {
			d := e.Delay(attempt)
			if d < last {
				t.Fatalf("%+v: delay shrinks from %v to %v at attempt %d", e, last, d, attempt)
			}
			last = d
		}
	})
}

func TestExponentialMediansGrow(t *testing.T) {
	t.Parallel()
	var last time.Duration
	for attempt := 1; attempt <= 7; attempt++ { // 64 s: well below the bound
		median := sample(backoff.Default(), attempt)[500]
		want := time.Second << (attempt - 1)
		if median <= last || median < want*9/10 || median > want*11/10 {
			t.Errorf("attempt %d: median %v, want about %v", attempt, median, want)
		}
		last = median
	}
}

// C44
func TestExponentialSpreadsRetries(t *testing.T) {
	t.Parallel()
	for _, attempt := range []int{1, 5, 1_000_000} {
		delays := sample(backoff.Default(), attempt)
		low, high := delays[0], delays[len(delays)-1]
		if float64(high) < 1.3*float64(low) {
			t.Errorf("attempt %d: all delays lie between %v and %v", attempt, low, high)
		}
		distinct := len(slices.Compact(delays))
		if distinct < 900 {
			t.Errorf("attempt %d: 1000 delays have %d values", attempt, distinct)
		}
		if high > backoff.DefaultMax {
			t.Errorf("attempt %d: delay %v is longer than the bound", attempt, high)
		}
	}
}

// sample gives a thousand delays after an attempt, sorted.
func sample(p backoff.Policy, attempt int) []time.Duration {
	delays := make([]time.Duration, 1000)
	for i := range delays {
		delays[i] = p.Delay(attempt)
	}
	slices.Sort(delays)
	return delays
}

func TestExponentialDefaults(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		policy  backoff.Exponential
		attempt int
		want    time.Duration
	}{
		{"initial", backoff.Exponential{}, 1, time.Second},
		{"multiplier", backoff.Exponential{}, 3, 4 * time.Second},
		{"max", backoff.Exponential{}, 1_000_000, 5 * time.Minute},
		{"initial above the default max", backoff.Exponential{Initial: time.Hour}, 9, time.Hour},
		{"max below the default initial", backoff.Exponential{Max: time.Millisecond}, 1, time.Millisecond},
		{"attempt 0", backoff.Exponential{}, 0, time.Second},
		{"largest attempt", backoff.Exponential{Max: math.MaxInt64}, math.MaxInt, math.MaxInt64},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tt.policy.Jitter = backoff.NoJitter
			if err := tt.policy.Validate(); err != nil {
				t.Fatal(err)
			}
			if got := tt.policy.Delay(tt.attempt); got != tt.want {
				t.Errorf("delay after attempt %d is %v, want %v", tt.attempt, got, tt.want)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	tests := []struct {
		policy backoff.Policy
		want   string
	}{
		{backoff.Default(), ""},
		{backoff.Constant(0), ""},
		{backoff.Func(func(int) time.Duration { return 0 }), ""},
		{unchecked{}, ""},
		{nil, "backoff: policy is nil"},
		{backoff.Func(nil), "backoff: Func is nil"},
		{backoff.Constant(-1), "backoff: Constant -1ns is negative"},
		{backoff.Exponential{Initial: -1}, "backoff: Initial -1ns is negative"},
		{backoff.Exponential{Max: -1}, "backoff: Max -1ns is less than Initial 1s"},
		{backoff.Exponential{Initial: 2, Max: 1}, "backoff: Max 1ns is less than Initial 2ns"},
		{backoff.Exponential{Multiplier: 0.9}, "backoff: Multiplier 0.9 is not a finite number of at least 1"},
		{backoff.Exponential{Multiplier: math.NaN()}, "backoff: Multiplier NaN is not a finite number of at least 1"},
		{backoff.Exponential{Multiplier: math.Inf(1)}, "backoff: Multiplier +Inf is not a finite number of at least 1"},
		{backoff.Exponential{Jitter: 1}, "backoff: Jitter 1 is not between 0 and 1"},
		{backoff.Exponential{Jitter: -0.1}, "backoff: Jitter -0.1 is not between 0 and 1"},
		{backoff.Exponential{Jitter: math.NaN()}, "backoff: Jitter NaN is not between 0 and 1"},
	}
	for _, tt := range tests {
		got := ""
		if err := backoff.Validate(tt.policy); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%+v: error %q, want %q", tt.policy, got, tt.want)
		}
	}
}

type unchecked struct{}

func (unchecked) Delay(int) time.Duration { return 0 }

func TestDelayIsNeverNegative(t *testing.T) {
	t.Parallel()
	negative := backoff.Func(func(int) time.Duration { return -time.Hour })
	for _, p := range []backoff.Policy{
		negative, backoff.Constant(-time.Hour),
		backoff.Exponential{Initial: -1},
		backoff.Exponential{Max: -1},
		backoff.Exponential{Jitter: 7},
		backoff.Exponential{Multiplier: math.Inf(-1)},
		backoff.Exponential{Jitter: math.NaN()},
	} {
		for attempt := -1; attempt < 70; attempt++ {
			if d := p.Delay(attempt); d < 0 {
				t.Errorf("%+v: delay after attempt %d is %v", p, attempt, d)
			}
		}
	}
}

func TestDelayIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	p := backoff.Default()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for attempt := range 1000 {
				if d := p.Delay(attempt); d <= 0 || d > backoff.DefaultMax {
					t.Errorf("delay after attempt %d is %v", attempt, d)
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkExponential(b *testing.B) {
	p := backoff.Default()
	for b.Loop() {
		p.Delay(1_000_000)
	}
}

func ExampleExponential() {
	p := backoff.Exponential{Initial: 100 * time.Millisecond, Max: time.Second, Jitter: backoff.NoJitter}
	for attempt := 1; attempt <= 5; attempt++ {
		fmt.Println(p.Delay(attempt))
	}
	// Output:
	// 100ms
	// 200ms
	// 400ms
	// 800ms
	// 1s
}

func ExampleFunc() {
	p := backoff.Func(func(attempt int) time.Duration {
		if attempt <= 3 {
			return time.Second
		}
		return time.Hour
	})
	fmt.Println(p.Delay(3), p.Delay(4))
	// Output: 1s 1h0m0s
}
