package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

const (
	// changeChunk is the number of messages that one transaction changes.
	changeChunk = 1000
	// changeWindow is the number of ids that are looked up at a time, for each
	// look may pass over the index of all candidates.
	changeWindow = 100 * changeChunk
)

// markedDead is the last error of a message that never failed before an
// operator marked it dead.
const markedDead = "marked dead by an operator"

// change is something an operator does to messages, one by one.
type change struct {
	what    string
	sources []source
	// only is a further condition on the messages that it applies to.
	only func(adminSyntax) string
	// apply is the statement up to its WHERE.
	apply func(adminSyntax) string
}

var (
	retryDead = change{
		what:    "retry dead messages",
		sources: Dead.sources(),
		apply: func(s adminSyntax) string {
			return "UPDATE {messages} SET status = 'pending', attempts = 0, dead_at = NULL, due_at = " + s.now() + ", scheduled_at = " + s.epoch()
		},
	}
	retryNow = change{
		what:    "retry messages now",
		sources: []source{sourceFailed},
		only:    func(s adminSyntax) string { return "scheduled_at > " + s.now() },
		apply:   func(s adminSyntax) string { return "UPDATE {messages} SET scheduled_at = " + s.now() },
	}
	markDead = change{
		what:    "mark messages dead",
		sources: Pending.sources(),
		apply: func(s adminSyntax) string {
			return "UPDATE {messages} SET status = 'dead', scheduled_at = NULL, last_error = COALESCE(last_error, '" + markedDead + "'), dead_at = " + s.now()
		},
	}
	discard = change{
		what:    "discard messages",
		sources: Status("").sources(),
		apply:   func(adminSyntax) string { return "DELETE FROM {messages}" },
	}
)

// RetryDead makes dead messages pending again and returns how many. They keep
// their ids and last errors, start with no attempts, are due at once, and go
// before anything of their group that has not been fetched, in the order of
// their ids. Ids of other messages are ignored. Like every change of messages
// it works in transactions of 1,000, so that an error, or the end of ctx,
// leaves what was done until then; the count tells.
func (a *Admin) RetryDead(ctx context.Context, outbox string, ids []int64) (int, error) {
	return a.changeIDs(ctx, retryDead, outbox, ids)
}

// RetryDeadWhere is RetryDead for the messages that a filter selects. Since it
// goes by ascending id, it does not come back to a message that dies again
// meanwhile, and of several calls at one time only one retries a message.
func (a *Admin) RetryDeadWhere(ctx context.Context, outbox string, f Filter) (int, error) {
	return a.changeWhere(ctx, retryDead, outbox, f)
}

// RetryNow makes failed messages that wait for their next attempt due at once.
// Their attempts stay counted.
func (a *Admin) RetryNow(ctx context.Context, outbox string, f Filter) (int, error) {
	return a.changeWhere(ctx, retryNow, outbox, f)
}

// MarkDead gives pending messages up. One that a worker is delivering at the
// moment may be delivered all the same.
func (a *Admin) MarkDead(ctx context.Context, outbox string, ids []int64) (int, error) {
	return a.changeIDs(ctx, markDead, outbox, ids)
}

// Discard deletes messages of any status. One that a worker is delivering at
// the moment may be delivered all the same.
func (a *Admin) Discard(ctx context.Context, outbox string, ids []int64) (int, error) {
	return a.changeIDs(ctx, discard, outbox, ids)
}

// DiscardWhere is Discard for the messages that a filter selects.
func (a *Admin) DiscardWhere(ctx context.Context, outbox string, f Filter) (int, error) {
	return a.changeWhere(ctx, discard, outbox, f)
}

func (a *Admin) changeIDs(ctx context.Context, c change, outbox string, ids []int64) (int, error) {
	name, err := a.table(outbox)
	if err != nil {
		return 0, err
	}
	ids = slices.Clone(ids)
	slices.Sort(ids)
	n, err := a.changeAll(ctx, c, name, outbox, Filter{}, slices.Compact(ids))
	return n, c.wrap(outbox, err)
}

func (a *Admin) changeWhere(ctx context.Context, c change, outbox string, f Filter) (int, error) {
	name, err := a.table(outbox)
	if err != nil {
		return 0, err
	}
	if f == (Filter{}) {
		return 0, c.wrap(outbox, errEmptyFilter)
	}
	if err := f.validate(); err != nil {
		return 0, c.wrap(outbox, err)
	}
	if f.Status != "" {
		if c.sources = c.within(f.Status); len(c.sources) == 0 {
			return 0, c.wrap(outbox, fmt.Errorf("filter: Status is %q, which it never concerns", f.Status))
		}
	}
	done := 0
	for {
		ids, err := a.lookUp(ctx, c, name, outbox, f)
		if err != nil {
			return done, c.wrap(outbox, err)
		}
		n, err := a.changeAll(ctx, c, name, outbox, f, ids)
		done += n
		if err != nil || len(ids) < a.window {
			return done, c.wrap(outbox, err)
		}
		f.AfterID = ids[len(ids)-1]
	}
}

// within are the sources of the change that hold messages of the status.
func (c change) within(status Status) []source {
	if slices.Equal(c.sources, []source{sourceFailed}) && status == Pending {
		return c.sources
	}
	of := status.sources()
	return slices.DeleteFunc(slices.Clone(c.sources), func(s source) bool { return !slices.Contains(of, s) })
}

func (c change) wrap(outbox string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s of %q: %w", c.what, outbox, err)
}

// condition is what a message must meet to be changed, apart from its source.
func (c change) condition(s *statement, outbox string, f Filter) string {
	condition := "outbox = " + s.arg(outbox) + f.condition(s)
	if c.only != nil {
		condition += " AND " + c.only(s.syntax)
	}
	return condition
}

// lookUp gives the ids of the first messages to be changed, ascending.
func (a *Admin) lookUp(ctx context.Context, c change, name tables.Name, outbox string, f Filter) ([]int64, error) {
	s := a.statement(name)
	s.selectIDs(c.sources, c.condition(s, outbox, f), false, a.window)
	var ids []int64
	err := a.syntax.read(ctx, false, func(tx engine.Tx) error {
		ids = ids[:0]
		return s.query(ctx, tx, func(rows *sql.Rows) error {
			var id int64
			err := rows.Scan(&id)
			ids = append(ids, id)
			return err
		})
	})
	return ids, err
}

// changeAll changes the messages of a list of ascending ids, a chunk at a time.
// Every statement looks again whether each message is still meant: that it has
// not been changed by somebody else since its id was read. Because chunks are
// committed in the order of ids, no message is changed before an earlier one of
// its group.
func (a *Admin) changeAll(ctx context.Context, c change, name tables.Name, outbox string, f Filter, ids []int64) (int, error) {
	done := 0
	for chunk := range slices.Chunk(ids, changeChunk) {
		if err := context.Cause(ctx); err != nil {
			return done, err
		}
		n := 0
		err := a.syntax.write(ctx, func(tx engine.Tx) (err error) {
			n, err = c.statement(a, name, outbox, f, chunk).exec(ctx, tx)
			return err
		})
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

// statement changes the messages of a chunk that are still meant. What is
// looked at again is within a CASE, so that the planner cannot take it for a
// way to find them: the ids are, and an index of every dead message is not.
func (c change) statement(a *Admin, name tables.Name, outbox string, f Filter, ids []int64) *statement {
	s := a.statement(name)
	list := s.arg(a.syntax.idList(ids))
	var sources []string
	for _, source := range c.sources {
		sources = append(sources, "("+string(source)+")")
	}
	s.add(c.apply(a.syntax))
	s.addf(" WHERE %s AND CASE WHEN %s AND (%s) THEN 1 ELSE 0 END = 1",
		a.syntax.amongIDs(list), c.condition(s, outbox, f), strings.Join(sources, " OR "))
	return s
}
