package engine

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// MaxErrorBytes is the length to which an error's text is cut before it is
// stored beside its message.
const MaxErrorBytes = 4096

// ErrNotAttempted stands in a BatchError for a message that was not sent, for
// whatever reason. Such a message is never charged: it stays as it is and is
// fetched again.
var ErrNotAttempted = errors.New("outbox: not attempted")

// ErrAlreadyRunning is returned by Start while the instance runs and, where
// only one process may relay from a database, while another one does.
var ErrAlreadyRunning = errors.New("outbox: already running")

// ErrStopped is returned by a Start that a Stop overtook, and is the cause of a
// relay's context that a Stop ended.
var ErrStopped = errors.New("outbox: stopped")

// ErrOwnershipLost is the cause of a delivery's cancelled context when the
// worker no longer owns the partition: its transaction or its connection is
// gone, and another node may already deliver the same messages.
var ErrOwnershipLost = errors.New("outbox: ownership of the partition was lost")

// BatchError is a Relay's account of a batch of which some messages failed.
// Messages that it does not name were delivered.
type BatchError struct {
	// Failed holds the error of each message that was not delivered, by
	// Envelope.ID. An error may be ErrNotAttempted, Permanent or RetryAfter,
	// wrapped or not. An id that is not in the batch is ignored.
	Failed map[int64]error
	// Outage, if set, says that the destination is unavailable. What was
	// delivered or failed is recorded all the same, then the worker waits
	// before it tries the next batch.
	Outage error
}

// Fail records that the message with the given id failed with err.
func (e *BatchError) Fail(id int64, err error) {
	if e.Failed == nil {
		e.Failed = make(map[int64]error)
	}
	e.Failed[id] = err
}

// Error tells how many messages failed, with one of their errors.
func (e *BatchError) Error() string {
	if e.Outage != nil {
		return fmt.Sprintf("outbox: %d messages not delivered: destination unavailable: %v", len(e.Failed), e.Outage)
	}
	var first int64
	for id, err := range e.Failed {
		if !errors.Is(err, ErrNotAttempted) && (first == 0 || id < first) {
			first = id
		}
	}
	if first == 0 {
		return fmt.Sprintf("outbox: %d messages not attempted", len(e.Failed))
	}
	return fmt.Sprintf("outbox: %d messages not delivered, the first (id %d): %v", len(e.Failed), first, e.Failed[first])
}

// Unwrap gives the outage, so that errors.Is and errors.As see it.
func (e *BatchError) Unwrap() error { return e.Outage }

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent marks an error that retrying cannot help, such as a payload that
// the destination will never accept. In an outbox with MaxAttempts or
// GiveUpAfter the message is dead at once; in a strict outbox, which never
// gives a message up, it is retried like any other. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// IsPermanent reports whether err was marked by Permanent.
func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

type retryAfterError struct {
	err   error
	delay time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// RetryAfter marks an error of a destination that said when to come back: the
// next attempt is made d from now instead of when the backoff policy says. A
// negative d counts as zero. RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err, max(d, 0)}
}

// RetryDelay returns the delay of an error marked by RetryAfter.
func RetryDelay(err error) (time.Duration, bool) {
	var r *retryAfterError
	if !errors.As(err, &r) {
		return 0, false
	}
	return r.delay, true
}

type unavailableError struct{ err error }

func (e *unavailableError) Error() string { return e.err.Error() }
func (e *unavailableError) Unwrap() error { return e.err }

// Unavailable marks an error of an Each function that is not this message's
// fault: the destination is down. Each stops sending, no message is charged,
// and the worker waits. Unavailable(nil) is nil.
func Unavailable(err error) error {
	if err == nil {
		return nil
	}
	return &unavailableError{err}
}

// IsUnavailable reports whether err was marked by Unavailable.
func IsUnavailable(err error) bool {
	var u *unavailableError
	return errors.As(err, &u)
}

// Relay hands messages to their destination.
//
// Deliver is called with at least one message, all of one partition of one
// outbox, in the order in which they are to be sent: those of one group in the
// order of their commits. Partitions are delivered side by side, so Deliver is
// called concurrently, but never for the same partition at once in one process.
// The batch is only lent: neither the slice nor payloads and headers may be
// changed, or kept after Deliver has returned.
//
// It returns nil when every message was delivered, a *BatchError (as itself or
// wrapped) that names those that were not, or any other error when the
// destination is unavailable: then no message is blamed, and those that were
// sent nevertheless will be sent again. After the first failure in a group the
// later messages of the group must not be sent; they are named with
// ErrNotAttempted.
//
// The context ends after the outbox's DeliverTimeout, at the deadline of Stop,
// or when the worker lost the partition (its cause is ErrOwnershipLost).
// Deliver must then return soon: a call that ignores its context is abandoned
// and its result thrown away, and its partition is not served in this process
// until it returns.
//
// Delivery is at least once: the same message, with the same DedupID, may come
// again after a crash, a timeout or a lost connection.
type Relay interface {
	Deliver(ctx context.Context, batch []Envelope) error
}
