package engine

import (
	"errors"
	"strings"
	"time"
	"unicode/utf8"
)

// outcome is what one call of the relay came to.
type outcome struct {
	settlement   Settlement
	notAttempted int
	// outage, if set, says that the destination is unavailable, or that
	// nothing at all could be attempted.
	outage error
	// sweeping: the outage is one error for the whole batch, which leaves open
	// whether the destination is down or one message spoils it.
	sweeping bool
	// panicked: the whole call panicked, which is never the destination's doing.
	panicked bool
	// abandoned: the call still runs; its outcome will never be known.
	abandoned bool
}

func (o *outcome) delivered() int { return len(o.settlement.Delivered) }

// charged counts the messages whose attempt is recorded.
func (o *outcome) charged() int { return len(o.settlement.Failed) + len(o.settlement.Dead) }

// progress reports whether anything became of any message.
func (o *outcome) progress() bool { return o.delivered()+o.charged() > 0 }

// judge turns the relay's answer into an outcome. now is the database's clock
// when the batch was fetched.
func (o *OutboxConfig) judge(batch []Envelope, err error, now time.Time) outcome {
	var failed *BatchError
	if err != nil && !errors.As(err, &failed) {
		var p *PanicError
		return outcome{
			notAttempted: len(batch),
			outage:       err,
			sweeping:     true,
			panicked:     errors.As(err, &p) || errors.Is(err, errGoexit),
		}
	}
	out := outcome{settlement: Settlement{
		Delivered: make([]int64, 0, len(batch)),
		Keep:      o.Retention.KeepFor() > 0,
	}}
	if failed == nil {
		failed = &BatchError{}
	}
	blocked := make(map[string]bool, len(failed.Failed))
	for i := range batch {
		cause, group := failed.Failed[batch[i].ID], o.group(&batch[i])
		switch {
		case cause == nil:
			out.settlement.Delivered = append(out.settlement.Delivered, batch[i].ID)
		case errors.Is(cause, ErrNotAttempted) || group != "" && blocked[group]:
			// Behind a failure of its group it is not charged, whatever the
			// relay says: a group has one message that waits for its retry.
			out.notAttempted++
		default:
			blocked[group] = true
			o.charge(&out.settlement, &batch[i], cause, now)
		}
	}
	out.outage = failed.Outage
	if !out.progress() && out.outage == nil {
		out.outage = err // nothing was attempted: waiting beats spinning
	}
	return out
}

// group is what a failure of the message blocks; empty: itself alone.
func (o *OutboxConfig) group(env *Envelope) string {
	switch o.Ordering {
	case Total:
		return "*"
	case None:
		return ""
	}
	return env.GroupKey
}

// charge records a failed attempt of one message: a retry, or its death.
func (o *OutboxConfig) charge(s *Settlement, env *Envelope, cause error, now time.Time) {
	attempt := env.Attempts + 1
	f := Failure{ID: env.ID, Attempts: env.Attempts, Error: errorText(cause)}
	if o.dies(env, attempt, cause, now) {
		s.Dead = append(s.Dead, f)
		return
	}
	if d, ok := RetryDelay(cause); ok {
		f.Delay = d
	} else {
		f.Delay = max(o.Backoff.Delay(attempt), 0)
	}
	s.Failed = append(s.Failed, f)
}

func (o *OutboxConfig) dies(env *Envelope, attempt int, cause error, now time.Time) bool {
	switch {
	case o.strict():
		return false
	case IsPermanent(cause):
		return true
	case o.MaxAttempts > 0 && attempt >= o.MaxAttempts:
		return true
	}
	return o.GiveUpAfter > 0 && now.Sub(env.DueAt) >= o.GiveUpAfter
}

// errorText is an error as it is stored: valid, without NUL, and bounded.
func errorText(err error) string {
	text := strings.ToValidUTF8(err.Error(), "\uFFFD")
	return truncate(strings.ReplaceAll(text, "\x00", "\uFFFD"), MaxErrorBytes)
}

// truncate cuts s to at most n bytes, between two characters.
func truncate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
