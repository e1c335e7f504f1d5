package dialect

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// OutboxFacts is what a configuration says of an outbox that the database
// records.
type OutboxFacts struct {
	Name string
	// Partitions is the count for an outbox that is not recorded yet; 0: 1.
	Partitions int
	Ordering   engine.Ordering
}

// recorded is the row of an outbox in the meta table.
type recorded struct {
	partitions int
	superseded []int
	ordering   string
	pausedAt   time.Time
}

// EnsureOutboxes records the outboxes that are not recorded yet, and the
// orderings that have changed. A partition count that is recorded stays as it
// is. It may be called by several nodes at once.
func (a *Admin) EnsureOutboxes(ctx context.Context, outboxes []OutboxFacts) error {
	byTable := make(map[tables.Name][]OutboxFacts)
	for _, o := range outboxes {
		name, err := a.table(o.Name)
		if err != nil {
			return err
		}
		byTable[name] = append(byTable[name], o)
	}
	for name, list := range byTable {
		var known map[string]recorded
		err := a.syntax.read(ctx, false, func(tx engine.Tx) (err error) {
			known, err = a.recorded(ctx, tx, name)
			return err
		})
		if err != nil {
			return fmt.Errorf("record outboxes: %w", err)
		}
		for _, o := range list {
			if r, ok := known[o.Name]; ok && r.ordering == o.Ordering.String() {
				continue
			}
			if err := a.record(ctx, name, o); err != nil {
				return fmt.Errorf("record outbox %q: %w", o.Name, err)
			}
		}
	}
	return nil
}

// record writes one outbox. Whoever else did it meanwhile has chosen the
// partition count.
func (a *Admin) record(ctx context.Context, name tables.Name, o OutboxFacts) error {
	s := a.statement(name)
	s.addf(`INSERT INTO {meta} (outbox, partitions, ordering) VALUES (%s, %s, %s)
ON CONFLICT (outbox) DO UPDATE SET ordering = excluded.ordering`,
		s.arg(o.Name), s.arg(max(o.Partitions, 1)), s.arg(o.Ordering.String()))
	return a.syntax.write(ctx, func(tx engine.Tx) error {
		_, err := s.exec(ctx, tx)
		return err
	})
}

// recorded reads what the table's meta table says of every outbox.
func (a *Admin) recorded(ctx context.Context, tx engine.Tx, name tables.Name) (map[string]recorded, error) {
	known := make(map[string]recorded)
	s := a.statement(name)
	s.addf("SELECT outbox, partitions, superseded, ordering, %s FROM {meta} WHERE outbox <> ''", a.syntax.micros("paused_at"))
	err := s.query(ctx, tx, func(rows *sql.Rows) error {
		var (
			r                  recorded
			outbox, superseded string
			paused             sql.NullInt64
		)
		err := rows.Scan(&outbox, &r.partitions, &superseded, &r.ordering, &paused)
		r.superseded, r.pausedAt = parseCounts(superseded), microTime(paused)
		known[outbox] = r
		return err
	})
	return known, err
}

// PartitionChange is the outcome of SetPartitions.
type PartitionChange struct {
	// Current is the count in force now.
	Current int
	// Changed says that this call has put it in force.
	Changed bool
	// Superseded says that the wanted count was in force before and has been
	// replaced since, so that it was not brought back.
	Superseded bool
}

// SetPartitions puts a partition count in force, for all nodes. Unless it is
// explicit, a count that was in force before and has been replaced is left
// alone: it is that of an old node in a rolling deploy. Messages under the old
// count are moved by Storage.Remap. The outbox must have been recorded.
func (a *Admin) SetPartitions(ctx context.Context, outbox string, n int, explicit bool) (PartitionChange, error) {
	name, err := a.table(outbox)
	if err != nil {
		return PartitionChange{}, err
	}
	var change PartitionChange
	err = a.syntax.write(ctx, func(tx engine.Tx) error {
		r, err := a.lockMeta(ctx, tx, name, outbox)
		if err != nil {
			return err
		}
		change = r.change(n, explicit)
		if !change.Changed {
			return nil
		}
		s := a.statement(name)
		s.addf("UPDATE {meta} SET partitions = %s, superseded = %s, epoch = epoch + 1 WHERE outbox = %s",
			s.arg(n), s.arg(formatCounts(r.supersededBy(n))), s.arg(outbox))
		_, err = s.exec(ctx, tx)
		return err
	})
	if err != nil {
		return PartitionChange{}, fmt.Errorf("set the partitions of %q to %d: %w", outbox, n, err)
	}
	return change, nil
}

// lockMeta locks the row of an outbox by writing it, which also makes a writer
// of the transaction, and then reads it: a statement that waited for the lock
// could give what was there before.
func (a *Admin) lockMeta(ctx context.Context, tx engine.Tx, name tables.Name, outbox string) (recorded, error) {
	s := a.statement(name)
	s.addf("UPDATE {meta} SET epoch = epoch WHERE outbox = %s", s.arg(outbox))
	n, err := s.exec(ctx, tx)
	switch {
	case err != nil:
		return recorded{}, err
	case n == 0:
		return recorded{}, errors.New("the outbox is not recorded")
	}
	known, err := a.recorded(ctx, tx, name)
	return known[outbox], err
}

// change decides what becomes of a request for n partitions.
func (r recorded) change(n int, explicit bool) PartitionChange {
	switch {
	case n == r.partitions:
		return PartitionChange{Current: n}
	case !explicit && slices.Contains(r.superseded, n):
		return PartitionChange{Current: r.partitions, Superseded: true}
	}
	return PartitionChange{Current: n, Changed: true}
}

// supersededBy gives the replaced counts once n is in force, oldest first.
func (r recorded) supersededBy(n int) []int {
	rest := slices.DeleteFunc(slices.Clone(r.superseded), func(c int) bool { return c == n || c == r.partitions })
	return append(rest, r.partitions)
}

func parseCounts(text string) []int {
	var counts []int
	for field := range strings.FieldsSeq(text) {
		if n, err := strconv.Atoi(field); err == nil {
			counts = append(counts, n)
		}
	}
	return counts
}

func formatCounts(counts []int) string {
	fields := make([]string, len(counts))
	for i, n := range counts {
		fields[i] = strconv.Itoa(n)
	}
	return strings.Join(fields, " ")
}

// Pause keeps every node from fetching messages of the outbox, until Resume.
// An outbox that is paused already stays paused since then.
func (a *Admin) Pause(ctx context.Context, outbox string) error {
	return a.setPaused(ctx, outbox, "pause", `INSERT INTO {meta} AS m (outbox, paused_at) VALUES (%s, `+a.syntax.now()+`)
ON CONFLICT (outbox) DO UPDATE SET paused_at = COALESCE(m.paused_at, excluded.paused_at)`)
}

// Resume ends a Pause.
func (a *Admin) Resume(ctx context.Context, outbox string) error {
	return a.setPaused(ctx, outbox, "resume", "UPDATE {meta} SET paused_at = NULL WHERE outbox = %s AND paused_at IS NOT NULL")
}

func (a *Admin) setPaused(ctx context.Context, outbox, what, text string) error {
	name, err := a.table(outbox)
	if err != nil {
		return err
	}
	s := a.statement(name)
	s.addf(text, s.arg(outbox))
	err = a.syntax.write(ctx, func(tx engine.Tx) error {
		_, err := s.exec(ctx, tx)
		return err
	})
	if err != nil {
		return fmt.Errorf("%s %q: %w", what, outbox, err)
	}
	return nil
}
