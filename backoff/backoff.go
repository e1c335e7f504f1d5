// Package backoff holds retry policies: how long to wait after the n-th failed
// attempt. A policy keeps no state between calls. The number of attempts is
// stored with what is retried, so that a restart, another node or another
// worker carries on where the last one stopped.
//
// The arithmetic of the randomised interval is that of
// github.com/cenkalti/backoff.
package backoff

import (
	"errors"
	"fmt"
	"math"
	"time"

	cenkalti "github.com/cenkalti/backoff/v4"
)

// Policy says how long to wait before the next attempt.
type Policy interface {
	// Delay is the time from the failure of the given attempt to the next one.
	// Attempt 1 is the first. Delay is never negative, is safe for concurrent
	// use, does not block and need not give the same value twice.
	Delay(attempt int) time.Duration
}

// The defaults of Exponential's fields.
const (
	DefaultInitial    = time.Second
	DefaultMax        = 5 * time.Minute
	DefaultMultiplier = 2
	DefaultJitter     = 0.2
)

// NoJitter, as Exponential.Jitter, turns the jitter off. What failed together
// is then retried together.
const NoJitter = -1

// Exponential multiplies the delay with each attempt, up to a bound, and
// spreads it at random, so that what failed together is not retried together.
// The zero value is the default policy.
type Exponential struct {
	// Initial is the delay after the first attempt, before jitter. At least a
	// nanosecond and at most Max; defaults to DefaultInitial.
	Initial time.Duration
	// Jitter is the part of a delay by which it may be shorter or longer. Less
	// than 1, or NoJitter; defaults to DefaultJitter.
	Jitter float64
	// Max is the longest delay, jitter included. Once it is reached, the delays
	// are spread below it: between Max*(1-Jitter)/(1+Jitter) and Max. Defaults
	// to DefaultMax, or to Initial if that is longer.
	Max time.Duration
	// Multiplier is the factor from one delay to the next, at least 1.
	// Defaults to DefaultMultiplier.
	Multiplier float64
}

// Default is the policy of an outbox that sets none: one second, doubled with
// each attempt, at most five minutes, with jitter.
func Default() Policy { return Exponential{} }

// Validate returns an error that names the field which is out of its bounds.
func (e Exponential) Validate() error {
	e = e.withDefaults()
	switch {
	case e.Initial < 0:
		return fmt.Errorf("backoff: Initial %v is negative", e.Initial)
	case e.Max < e.Initial:
		return fmt.Errorf("backoff: Max %v is less than Initial %v", e.Max, e.Initial)
	case !(e.Multiplier >= 1) || math.IsInf(e.Multiplier, 0): // a NaN fails every comparison
		return fmt.Errorf("backoff: Multiplier %v is not a finite number of at least 1", e.Multiplier)
	case e.Jitter != NoJitter && !(e.Jitter >= 0 && e.Jitter < 1):
		return fmt.Errorf("backoff: Jitter %v is not between 0 and 1", e.Jitter)
	}
	return nil
}

// Delay implements Policy. An attempt below 1 counts as the first. Where
// Validate has an error, the delays are those of the default policy.
func (e Exponential) Delay(attempt int) time.Duration {
	if e.Validate() != nil {
		e = Exponential{}
	}
	e = e.withDefaults()
	if e.Jitter == NoJitter {
		e.Jitter = 0
	}
	interval := cenkalti.ExponentialBackOff{
		InitialInterval:     e.interval(attempt),
		RandomizationFactor: e.Jitter,
		Multiplier:          1, // interval has multiplied already
		MaxInterval:         e.Max,
		Clock:               cenkalti.SystemClock,
	}
	interval.Reset()
	d := interval.NextBackOff()
	if d < 0 || d > e.Max { // floats are coarse near the largest duration
		return e.Max
	}
	return d
}

// interval is the middle of the delays after an attempt. It is computed
// directly, because the number of attempts has no bound.
func (e Exponential) interval(attempt int) time.Duration {
	top := e.Max
	if e.Jitter > 0 {
		top = time.Duration(float64(e.Max) / (1 + e.Jitter))
	}
	d := float64(e.Initial) * math.Pow(e.Multiplier, float64(max(attempt, 1)-1))
	if d >= float64(top) { // also if it is infinite
		return top
	}
	return time.Duration(d)
}

func (e Exponential) withDefaults() Exponential {
	if e.Initial == 0 {
		e.Initial = DefaultInitial
		if e.Max > 0 {
			e.Initial = min(e.Initial, e.Max)
		}
	}
	if e.Max == 0 {
		e.Max = max(DefaultMax, e.Initial)
	}
	if e.Multiplier == 0 {
		e.Multiplier = DefaultMultiplier
	}
	if e.Jitter == 0 {
		e.Jitter = DefaultJitter
	}
	return e
}

// Constant is the same delay after every attempt, without jitter.
type Constant time.Duration

// Delay implements Policy. A negative Constant is no delay.
func (c Constant) Delay(int) time.Duration { return max(0, time.Duration(c)) }

// Validate returns an error if the delay is negative.
func (c Constant) Validate() error {
	if c < 0 {
		return fmt.Errorf("backoff: Constant %v is negative", time.Duration(c))
	}
	return nil
}

// Func makes a policy of a function, which must be safe for concurrent use.
type Func func(attempt int) time.Duration

// Delay implements Policy. It turns a negative delay into none.
func (f Func) Delay(attempt int) time.Duration { return max(0, f(attempt)) }

// Validate returns an error if there is no function.
func (f Func) Validate() error {
	if f == nil {
		return errors.New("backoff: Func is nil")
	}
	return nil
}

// Validate returns p's own verdict, if it has a method Validate() error, and
// an error if p is nil.
func Validate(p Policy) error {
	if p == nil {
		return errors.New("backoff: policy is nil")
	}
	if v, ok := p.(interface{ Validate() error }); ok {
		return v.Validate()
	}
	return nil
}
