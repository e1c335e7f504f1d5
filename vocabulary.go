package outbox

import (
	"context"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// The vocabulary of delivery. It lives in package engine, so that relays and
// storages can speak it without GORM; these are the same types.
type (
	// Envelope is a stored message on its way to a relay.
	Envelope = engine.Envelope
	// Relay hands messages to their destination.
	Relay = engine.Relay
	// BatchError is a relay's account of a batch of which some messages failed.
	BatchError = engine.BatchError
	// EachOption is an option of Each.
	EachOption = engine.EachOption
	// DrainResult says what a Drain has achieved.
	DrainResult = engine.DrainResult

	// Observer is told what the workers do: the way to metrics.
	Observer = engine.Observer
	// Observation is one thing that happened to a partition in this process.
	Observation = engine.Observation
	// ObservationKind says what was observed.
	ObservationKind = engine.ObservationKind

	// Ordering is the order that an outbox keeps.
	Ordering = engine.Ordering
	// AfterDead says what becomes of a group whose message is dead.
	AfterDead = engine.AfterDead
	// Retention says what becomes of delivered messages.
	Retention = engine.Retention
)

// The orderings of an outbox.
const (
	// ByGroup delivers the messages of a group in commit order. Messages
	// without a group promise no order. This is the default.
	ByGroup = engine.ByGroup
	// Total delivers the whole outbox in commit order, as if all its messages
	// were of one group. It needs exactly one partition.
	Total = engine.Total
	// None promises no order: a failed message holds nobody.
	None = engine.None
)

// What becomes of a group whose message is dead.
const (
	// Continue delivers the group's later messages. This is the default.
	Continue = engine.Continue
	// HoldGroup holds the group until the dead message is retried or discarded.
	HoldGroup = engine.HoldGroup
)

// The kinds of an Observation.
const (
	BatchDone         = engine.BatchDone
	OutageBegan       = engine.OutageBegan
	OutageEnded       = engine.OutageEnded
	OwnershipLost     = engine.OwnershipLost
	DeliveryAbandoned = engine.DeliveryAbandoned
	SettleFailed      = engine.SettleFailed
)

// Delete removes a message when it is delivered. This is the default
// Retention and the cheapest.
var Delete = engine.Delete

// Keep is a Retention that leaves delivered messages in the table for d, at
// least a second, then pruning removes them. It costs an update a message.
func Keep(d time.Duration) Retention { return engine.Keep(d) }

// Each makes a relay of a function that delivers one message. What the function
// returns concerns that message alone: nil, it was delivered; Unavailable, the
// destination is down; any other error, which may be marked by Permanent or
// RetryAfter, as well as a panic or a timeout: the message failed. After a
// failure the later messages of the group are not sent; other groups go on.
func Each(fn func(context.Context, Envelope) error, opts ...EachOption) Relay {
	return engine.Each(fn, opts...)
}

// Concurrency lets Each deliver up to n groups of a batch side by side, each
// message without a group being one of its own. The messages of a group still
// go one after the other. The default and the least is 1.
func Concurrency(n int) EachOption { return engine.Concurrency(n) }

// Timeout bounds one call of Each's function; running into it counts as that
// message's failure. The default, and the most that makes sense, is half of
// Outbox.DeliverTimeout.
func Timeout(d time.Duration) EachOption { return engine.Timeout(d) }

// Permanent marks an error that retrying cannot help. With Outbox.MaxAttempts
// or Outbox.GiveUpAfter the message is dead at once; in a strict outbox, which
// never gives a message up, it is retried like any other. Permanent(nil) is
// nil.
func Permanent(err error) error { return engine.Permanent(err) }

// RetryAfter marks an error of a destination that said when to come back: the
// next attempt is made d from now instead of when the backoff policy says. A
// negative d counts as zero. RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error { return engine.RetryAfter(err, d) }

// Unavailable marks an error of an Each function that is not this message's
// fault: the destination is down. Each stops sending, no message is charged,
// and the worker waits. Unavailable(nil) is nil.
func Unavailable(err error) error { return engine.Unavailable(err) }
