package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
)

// The vocabulary of administration. These types live in package dialect; the
// dashboard and the command line tool speak it too.
type (
	// Status is what has become of a message.
	Status = dialect.Status
	// Filter selects messages of an outbox.
	Filter = dialect.Filter
	// Query asks Messages for a page.
	Query = dialect.MessageQuery
	// MessagePage is a page of messages in the order of their ids.
	MessagePage = dialect.MessagePage
	// MessageInfo is a message as it is stored.
	MessageInfo = dialect.MessageInfo
)

// The statuses of a message that is in its table.
const (
	// Pending: to be delivered, now or when it is due.
	Pending = dialect.Pending
	// Delivered: kept after its delivery, by Keep.
	Delivered = dialect.Delivered
	// Dead: given up, until it is retried.
	Dead = dialect.Dead
)

// wakeTimeout bounds the telling of other nodes, for which an operator who has
// cancelled does not wait long.
const wakeTimeout = 5 * time.Second

// pruneBatch is the number of messages that one transaction of Prune deletes.
const pruneBatch = 1000

// Messages gives a page of an outbox's messages. Paging goes by id, so that
// messages that come or go between two pages make none appear twice or be left
// out. Its cost depends on the messages of the outbox with the filter's status,
// and on how many must be looked at to find a page of those that are meant.
func (in *Instance) Messages(ctx context.Context, q Query) (MessagePage, error) {
	if q.Outbox == "" && in.config.DefaultOutbox != NoDefault {
		q.Outbox = in.config.DefaultOutbox
	}
	b, err := in.administer(q.Outbox)
	if err != nil {
		return MessagePage{}, err
	}
	page, err := b.admin.Messages(ctx, q)
	return page, administration(err)
}

// RetryDead makes dead messages pending again and returns how many. They keep
// their ids, are due at once, start with no attempts, and go before anything of
// their group that has not been fetched, in the order of their ids. Ids of
// messages that are not dead are ignored; no ids change nothing.
//
// Like every method that changes messages it works in transactions of 1,000 in
// the order of ids: an error, or the end of ctx, leaves what was done until
// then, and the count tells. Workers of all nodes are woken.
func (in *Instance) RetryDead(ctx context.Context, outbox string, ids ...int64) (int, error) {
	return in.change(ctx, outbox, func(a *dialect.Admin) (int, error) { return a.RetryDead(ctx, outbox, ids) })
}

// RetryDeadWhere is RetryDead for the messages that a filter selects; an empty
// Filter is an error. It comes to each message once, also if it dies again
// meanwhile, and of several calls at one time one retries it.
func (in *Instance) RetryDeadWhere(ctx context.Context, outbox string, f Filter) (int, error) {
	return in.change(ctx, outbox, func(a *dialect.Admin) (int, error) { return a.RetryDeadWhere(ctx, outbox, f) })
}

// RetryNow makes failed messages that wait for their next attempt due at once,
// and returns how many. Their attempts stay counted. Messages that a publisher
// delayed are left alone. An empty Filter is an error.
func (in *Instance) RetryNow(ctx context.Context, outbox string, f Filter) (int, error) {
	return in.change(ctx, outbox, func(a *dialect.Admin) (int, error) { return a.RetryNow(ctx, outbox, f) })
}

// MarkDead gives pending messages up, also in an outbox that is strict, and
// returns how many. One that a worker is delivering at the moment may be
// delivered all the same.
func (in *Instance) MarkDead(ctx context.Context, outbox string, ids ...int64) (int, error) {
	return in.change(ctx, outbox, func(a *dialect.Admin) (int, error) { return a.MarkDead(ctx, outbox, ids) })
}

// Discard deletes messages, whatever their status, and returns how many. One
// that a worker is delivering at the moment may be delivered all the same.
func (in *Instance) Discard(ctx context.Context, outbox string, ids ...int64) (int, error) {
	return in.change(ctx, outbox, func(a *dialect.Admin) (int, error) { return a.Discard(ctx, outbox, ids) })
}

// DiscardWhere is Discard for the messages that a filter selects; an empty
// Filter is an error.
func (in *Instance) DiscardWhere(ctx context.Context, outbox string, f Filter) (int, error) {
	return in.change(ctx, outbox, func(a *dialect.Admin) (int, error) { return a.DiscardWhere(ctx, outbox, f) })
}

// change runs fn and wakes the workers if it has changed messages: what was
// blocked by them may go on.
func (in *Instance) change(ctx context.Context, outbox string, fn func(*dialect.Admin) (int, error)) (int, error) {
	b, err := in.administer(outbox)
	if err != nil {
		return 0, err
	}
	n, err := fn(b.admin)
	if n > 0 {
		in.wakeAll(ctx, b, outbox)
	}
	return n, administration(err)
}

// Pause keeps every node from fetching messages of the outbox, until Resume;
// publishers go on. It is stored, so that it outlasts all processes. Batches in
// delivery are finished. An outbox that is paused stays so.
func (in *Instance) Pause(ctx context.Context, outbox string) error {
	b, err := in.administer(outbox)
	if err != nil {
		return err
	}
	return administration(b.admin.Pause(ctx, outbox))
}

// Resume ends a Pause. Workers of all nodes are woken.
func (in *Instance) Resume(ctx context.Context, outbox string) error {
	b, err := in.administer(outbox)
	if err != nil {
		return err
	}
	if err := b.admin.Resume(ctx, outbox); err != nil {
		return administration(err)
	}
	in.wakeAll(ctx, b, outbox)
	return nil
}

// Prune deletes what is past its retention, in transactions of 1,000 messages,
// and returns how much that was. Workers do it by themselves; several may do it
// at one time.
func (in *Instance) Prune(ctx context.Context) (int, error) {
	b, err := in.binding()
	if err != nil {
		return 0, err
	}
	total := 0
	for i := range in.config.Outboxes {
		n, err := in.prune(ctx, b, &in.config.Outboxes[i])
		total += n
		if err != nil {
			return total, administration(fmt.Errorf("prune %q: %w", in.config.Outboxes[i].Name, err))
		}
	}
	return total, nil
}

func (in *Instance) prune(ctx context.Context, b *binding, o *Outbox) (int, error) {
	q := engine.PruneQuery{Outbox: o.Name, Delivered: retention(o.Retention.KeepFor()), Dead: retention(o.DeadRetention), Limit: pruneBatch}
	if q.Delivered < 0 && q.Dead < 0 {
		return 0, nil
	}
	for total := 0; ; {
		n, err := b.storage.Prune(ctx, q)
		total += n
		if err != nil || n < pruneBatch {
			return total, err
		}
	}
}

// retention is a retention as engine.PruneQuery has it.
func retention(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

// administer checks the outbox and returns the database.
func (in *Instance) administer(outbox string) (*binding, error) {
	if _, err := in.outbox(outbox); err != nil {
		return nil, err
	}
	return in.binding()
}

// wakeAll wakes the workers of all nodes for every partition of the outbox,
// before it returns: the process may be about to exit. A node that cannot be
// told finds out by its poll, so an error changes nothing.
func (in *Instance) wakeAll(ctx context.Context, b *binding, outbox string) {
	wake := engine.Wake{Outbox: outbox, All: true}
	if eng := in.eng.Load(); eng != nil {
		eng.Wake(wake)
	}
	if in.config.Notify == Off {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), wakeTimeout)
	defer cancel()
	_ = b.storage.Notify(ctx, nil, []engine.Wake{wake})
}

// administration names the room an error comes from, and recognises missing
// tables.
func administration(err error) error {
	switch {
	case err == nil:
		return nil
	case isMissingTable(err):
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	return fmt.Errorf("outbox: %w", err)
}

// isMissingTable recognises the errors of PostgreSQL and SQLite for a table
// that does not exist.
func isMissingTable(err error) bool {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState() == "42P01"
	}
	return strings.Contains(err.Error(), "no such table")
}
