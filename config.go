package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/engine"
)

// DefaultTable is the message table of a Config that names none.
const DefaultTable = "outboxer_messages"

// NoDefault is the Config.DefaultOutbox that says that every message names its
// outbox.
const NoDefault = "\x00none"

// Config describes an Instance. Binaries that publish and binaries that relay
// share everything but Relays, so that it is best written once.
type Config struct {
	// Outboxes are the outboxes of the instance, at least one.
	Outboxes []Outbox
	// DefaultOutbox takes the messages that name no outbox. Defaults to the
	// only outbox; with several it must be set, if only to NoDefault.
	DefaultOutbox string
	// Relays are the relays by outbox. A binary that only publishes needs
	// none. One that relays needs a relay for each outbox, or Elsewhere.
	Relays map[string]Relay

	// Name tells several instances on one database handle apart: the plugin is
	// called "gormoutbox", or "gormoutbox:" and the name. It is in no way part
	// of what is stored. At most 100 bytes.
	Name string
	// Table is the message table of the outboxes that name none of their own,
	// at most 63 bytes. Defaults to DefaultTable.
	Table string
	// Schema is where the tables are, at most 63 bytes. Defaults to what the
	// search_path says. PostgreSQL only.
	Schema string

	// BeforeAdd, if set, sees every message before it is validated and may
	// change it: the place for trace and tenant headers. The context is that
	// of the handle given to Add. Its error is returned by Add, which then adds
	// nothing. It is called concurrently.
	BeforeAdd func(ctx context.Context, m *Message) error
	// Logger gets a line for each change of state of the workers, never a
	// payload or header. Defaults to none.
	Logger *zap.Logger
	// Observer is told what the workers do: the way to metrics. Defaults to
	// none.
	Observer Observer
	// Notify says how other nodes learn of new messages. Defaults to
	// AfterCommit. PostgreSQL only.
	Notify NotifyMode

	// PollInterval is the time between two looks at the tables while there is
	// no push; 30 seconds, or PollInterval where that is longer, while there
	// is. From 10 milliseconds to 24 hours; defaults to a second.
	PollInterval time.Duration
	// StopTimeout is how long the batches in delivery may go on after the end
	// of the context of Start or Run. At most 24 hours; defaults to 20 seconds.
	StopTimeout time.Duration
	// MaxDeliveries bounds the batches in delivery at one time, over all
	// outboxes. On PostgreSQL each holds a connection of the pool, so that it
	// must be less than the pool's MaxOpenConns. Defaults to half of that, at
	// least 1, or to 10 if the pool is unlimited.
	MaxDeliveries int

	// ListenDSN is where the worker listens for notifications, if the pool's
	// own connections cannot: with PgBouncer in transaction pooling, or with a
	// driver other than pgx. Defaults to the settings of the pool's
	// connections. PostgreSQL only.
	ListenDSN string
	// Listen, instead of ListenDSN, opens the connection to listen on. It is
	// called for each attempt and must give a new connection, which then
	// belongs to the listener.
	Listen func(context.Context) (*pgx.Conn, error)
}

// Outbox describes one outbox of a Config.
type Outbox struct {
	// Name is stored with every message. At most 100 bytes, without control
	// characters.
	Name string
	// Table is a message table of its own. Defaults to Config.Table.
	Table string
	// Relay is where messages go, instead of an entry of Config.Relays.
	Relay Relay

	// Partitions is the number of delivery lanes: how many batches of the
	// outbox can be in delivery at one time, over all nodes. From 1 to 10,000;
	// 0 means what the database records, and 1 for a new outbox. Start
	// records it.
	Partitions int
	// Ordering defaults to ByGroup.
	Ordering Ordering
	// ConcurrentPublishers lets transactions that overlap add to one group
	// without waiting for each other. It gives up the commit order between
	// them.
	ConcurrentPublishers bool
	// RequireGroup has Add refuse messages without a group.
	RequireGroup bool

	// BatchSize is how many messages a relay gets at most, from 1 to 10,000.
	// Defaults to 100.
	BatchSize int
	// MaxBatchBytes bounds the payloads of a batch, except that one message is
	// always delivered however large it is. Defaults to 8 MiB.
	MaxBatchBytes int
	// DeliverTimeout bounds the delivery of one batch. At most an hour;
	// defaults to 10 seconds.
	DeliverTimeout time.Duration

	// Backoff is the delay after a failed attempt. Defaults to a second,
	// doubled with each attempt, at most 5 minutes, with jitter.
	Backoff backoff.Policy
	// MaxAttempts is how many attempts a message gets until it is dead. 0: no
	// bound.
	MaxAttempts int
	// GiveUpAfter is the time since it was due after which a failing message is
	// dead (see Envelope.DueAt). 0: no bound. If this and MaxAttempts are 0, the outbox is
	// strict: no message is ever given up.
	GiveUpAfter time.Duration
	// AfterDead says what becomes of a group whose message is dead. Defaults
	// to Continue.
	AfterDead AfterDead

	// Retention says what becomes of delivered messages. Defaults to Delete.
	Retention Retention
	// DeadRetention is how long dead messages stay. 0: for ever.
	DeadRetention time.Duration
}

// NotifyMode says how other nodes learn of new messages. What this process
// relays itself is woken in memory in any mode.
type NotifyMode int

const (
	// AfterCommit sends a NOTIFY after the commit, off the business
	// transaction, for everything that was committed meanwhile at once. This
	// is the default.
	AfterCommit NotifyMode = iota
	// InTransaction sends the NOTIFY within the transaction, so that it cannot
	// be lost with the process. PostgreSQL serialises the commits of all
	// transactions that notify.
	InTransaction
	// Off sends no NOTIFY and listens to none: other nodes find messages
	// within their poll interval.
	Off
)

// Elsewhere is the relay of an outbox that another binary relays: Start is
// content, and leaves the outbox alone.
var Elsewhere Relay = elsewhere{}

type elsewhere struct{}

func (elsewhere) Deliver(context.Context, []Envelope) error {
	return errors.New("outbox: the outbox is relayed elsewhere")
}

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = DefaultTable
	}
	if c.DefaultOutbox == "" && len(c.Outboxes) == 1 {
		c.DefaultOutbox = c.Outboxes[0].Name
	}
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = engine.DefaultStopTimeout
	}
	outboxes := make([]Outbox, len(c.Outboxes))
	for i, o := range c.Outboxes {
		if o.Table == "" {
			o.Table = c.Table
		}
		if o.Relay == nil {
			o.Relay = c.Relays[o.Name]
		}
		if o.Ordering == Total {
			o.Partitions = 1
		}
		outboxes[i] = o
	}
	c.Outboxes, c.Relays = outboxes, nil
	return c
}
