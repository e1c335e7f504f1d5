package engine

import (
	"time"

	"go.uber.org/zap"

	"github.com/gormoutbox/outbox/backoff"
)

// AfterDead says what becomes of a group whose message is dead.
type AfterDead int

const (
	// Continue delivers the group's later messages. This is the default.
	Continue AfterDead = iota
	// HoldGroup holds the group until the dead message is retried or discarded.
	HoldGroup
)

// Retention says what becomes of delivered messages. The zero value is Delete.
type Retention struct{ keep time.Duration }

// Delete removes a message when it is delivered. This is the default and the
// cheapest: a message is written once and deleted once.
var Delete = Retention{}

// Keep leaves delivered messages in the table for d, at least a second, then
// pruning removes them. It costs an update a message.
func Keep(d time.Duration) Retention { return Retention{keep: max(d, time.Second)} }

// KeepFor returns how long delivered messages stay; 0 for Delete.
func (r Retention) KeepFor() time.Duration { return r.keep }

// Defaults of OutboxConfig and Config, used where a field is zero.
const (
	DefaultBatchSize      = 100
	DefaultMaxBatchBytes  = 8 << 20
	DefaultDeliverTimeout = 10 * time.Second
	DefaultPollInterval   = time.Second
	PushPollInterval      = 30 * time.Second
	DefaultStopTimeout    = 20 * time.Second
	DefaultMaxDeliveries  = 10
	DefaultPruneInterval  = 30 * time.Second
)

// OutboxConfig is one outbox that an engine relays.
type OutboxConfig struct {
	Name           string
	Relay          Relay
	Ordering       Ordering
	BatchSize      int           // messages a fetch; 0: DefaultBatchSize
	MaxBatchBytes  int           // payload bytes a fetch; 0: DefaultMaxBatchBytes
	DeliverTimeout time.Duration // of one batch; 0: DefaultDeliverTimeout
	Backoff        backoff.Policy
	MaxAttempts    int           // charged attempts until a message is dead; 0: no bound
	GiveUpAfter    time.Duration // age since it was due (Envelope.DueAt) at which a failing message is dead; 0: no bound
	AfterDead      AfterDead
	Retention      Retention
	DeadRetention  time.Duration // of dead messages; 0: for ever
}

// strict reports whether the outbox never gives a message up.
func (o *OutboxConfig) strict() bool { return o.MaxAttempts == 0 && o.GiveUpAfter == 0 }

func (o OutboxConfig) withDefaults() OutboxConfig {
	setDefault(&o.BatchSize, DefaultBatchSize)
	setDefault(&o.MaxBatchBytes, DefaultMaxBatchBytes)
	setDefault(&o.DeliverTimeout, DefaultDeliverTimeout)
	if o.Backoff == nil {
		o.Backoff = backoff.Default()
	}
	return o
}

// Config is what an Engine needs.
type Config struct {
	Storage  Storage
	Waker    Waker // nil: the poll finds everything
	Outboxes []OutboxConfig
	// MaxDeliveries bounds the batches in delivery at one time, over all
	// outboxes. 0: DefaultMaxDeliveries.
	MaxDeliveries int
	// PollInterval is the time between two probes while there is no push.
	// 0: DefaultPollInterval. While there is, it is PushPollInterval, or
	// PollInterval where that is longer.
	PollInterval time.Duration
	// StopTimeout is how long the batches in delivery may go on after a soft
	// stop. 0: DefaultStopTimeout.
	StopTimeout time.Duration
	// PruneInterval is the time between two prunings. 0: DefaultPruneInterval.
	PruneInterval time.Duration
	Logger        *zap.Logger // nil: none
	Observer      Observer    // nil: none
}

func (c Config) withDefaults() Config {
	setDefault(&c.MaxDeliveries, DefaultMaxDeliveries)
	setDefault(&c.PollInterval, DefaultPollInterval)
	setDefault(&c.StopTimeout, DefaultStopTimeout)
	setDefault(&c.PruneInterval, DefaultPruneInterval)
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	outboxes := make([]OutboxConfig, len(c.Outboxes))
	for i, o := range c.Outboxes {
		outboxes[i] = o.withDefaults()
	}
	c.Outboxes = outboxes
	return c
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
