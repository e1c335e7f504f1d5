package dialect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// insertChunk is the most rows that one statement inserts. Drivers look a
// statement's arguments up one by one, which makes long lists slow, and SQLite
// before 3.32 takes at most 999 of them.
const insertChunk = 50

// insertForm is the statements that insert messages of one outbox with one set
// of columns.
//
// They read the partition count that is in force where they use it: SQLite has
// one writer, so nobody can change it before that writer's transaction ends.
// The form for one row, the ordinary case, has scalar values only, which
// SQLite prepares in half the time of a SELECT; for several rows the SELECT
// pays, because it reads the count once.
type insertForm struct {
	one  string
	many string // to be followed by rows and a parenthesis
	row  string
}

// insertForms holds the forms by the optional columns they have: most messages
// have one of them or none, and each value costs time.
type insertForms [1 << len(optionalColumns)]insertForm

var optionalColumns = [...]string{"group_key", "headers", "scheduled_at"}

const (
	withGroup = 1 << iota
	withHeaders
	withSchedule
)

const liteReturning = ` RETURNING id, partition, (SELECT installation FROM {meta} WHERE outbox = '')`

func newInsertForms(table tables.Name, outbox string) (forms insertForms) {
	for set := range forms {
		columns, selected, values := "", "", ""
		count := 4
		for i, column := range optionalColumns {
			if set&(1<<i) == 0 {
				continue
			}
			count++
			columns += ", " + column
			selected += fmt.Sprintf(", column%d", count)
			values += ", ?"
		}
		names := strings.NewReplacer(
			"{messages}", table.Messages(), "{outbox}", tables.Literal(outbox),
			"{columns}", columns, "{selected}", selected, "{values}", values,
			"{partitions}", "COALESCE((SELECT partitions FROM "+table.Meta()+" WHERE outbox = "+tables.Literal(outbox)+"), 1)",
		)
		const into = `INSERT INTO {messages} (inserted_at, type, payload, partition, outbox, partitions{columns}) `
		forms[set] = insertForm{
			one: names.Replace(into + `VALUES (?, ?, ?, ? % {partitions}, {outbox}, {partitions}{values})`),
			many: names.Replace(into + `SELECT column1, column2, column3, column4 % n, {outbox}, n{selected}
FROM (SELECT {partitions} AS n), (VALUES `),
			row: names.Replace(`(?, ?, ?, ?{values})`),
		}
	}
	return forms
}

// text gives the statement that inserts n rows.
func (f *insertForm) text(n int) string {
	if n == 1 {
		return f.one
	}
	return f.many + f.row + strings.Repeat(", "+f.row, n-1) + ")"
}

// Insert implements engine.Storage. A database with one writer needs no group
// locks: the first statement of the first publisher makes the others wait.
// Rows of one outbox that follow each other are inserted together.
func (s *SQLite) Insert(ctx context.Context, tx engine.Tx, rows []engine.Row, returning bool) ([]engine.Envelope, error) {
	var inserted []engine.Envelope
	for start := 0; start < len(rows); {
		end := start + 1
		for end < len(rows) && end-start < insertChunk && rows[end].Outbox == rows[start].Outbox {
			end++
		}
		o, err := s.outbox(rows[start].Outbox)
		if err != nil {
			return nil, err
		}
		run := liteRun{rows: rows[start:end], outbox: o, now: s.micros()}
		if !returning {
			err = run.insert(ctx, tx)
		} else {
			inserted, err = run.insertReturning(ctx, tx, inserted)
		}
		if err != nil {
			return nil, fmt.Errorf("insert into %s: %w", o.table.Messages(), err)
		}
		start = end
	}
	return inserted, nil
}

// liteRun is rows of one outbox that are inserted by one statement.
type liteRun struct {
	rows   []engine.Row
	outbox *liteOutbox
	now    int64
}

// statement gives the form that has the columns that any of the rows needs,
// and the arguments.
func (r *liteRun) statement() (text string, args []any) {
	set := 0
	for i := range r.rows {
		set |= r.columns(&r.rows[i])
	}
	args = make([]any, 0, len(r.rows)*(4+len(optionalColumns)))
	for i := range r.rows {
		row := &r.rows[i]
		payload := row.Payload
		if payload == nil {
			payload = []byte{} // nil would be NULL
		}
		args = append(args, r.now, row.Type, payload, int64(row.Hash))
		if set&withGroup != 0 {
			args = append(args, nullIfEmpty(row.GroupKey))
		}
		if set&withHeaders != 0 {
			args = append(args, encodeHeaders(row.Headers))
		}
		if set&withSchedule != 0 {
			args = append(args, nullIfZero(r.dueAt(row)))
		}
	}
	return r.outbox.insert[set].text(len(r.rows)), args
}

func (r *liteRun) columns(row *engine.Row) (set int) {
	if row.GroupKey != "" {
		set |= withGroup
	}
	if len(row.Headers) > 0 {
		set |= withHeaders
	}
	if r.dueAt(row) != 0 {
		set |= withSchedule
	}
	return set
}

// dueAt is when the row is due; 0: at once.
func (r *liteRun) dueAt(row *engine.Row) int64 {
	at := r.now + row.Delay.Microseconds()
	if !row.DeliverAt.IsZero() {
		at = row.DeliverAt.UnixMicro()
	}
	if at <= r.now {
		return 0
	}
	return at
}

// insert asks for the context again when all seems well: glebarez/go-sqlite
// leaves a statement out and reports success if its context ends just before,
// and the transaction, which may have another context, could then be committed
// without the message.
func (r *liteRun) insert(ctx context.Context, tx engine.Tx) error {
	text, args := r.statement()
	if _, err := tx.ExecContext(ctx, text, args...); err != nil {
		return err
	}
	return ctx.Err()
}

// insertReturning appends the stored envelopes to list. RETURNING takes four
// times as long as a plain insert.
func (r *liteRun) insertReturning(ctx context.Context, tx engine.Tx, list []engine.Envelope) ([]engine.Envelope, error) {
	text, args := r.statement()
	returning := strings.ReplaceAll(liteReturning, "{meta}", r.outbox.table.Meta())
	found, err := tx.QueryContext(ctx, text+returning, args...)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	first := len(list)
	for found.Next() {
		e := engine.Envelope{Outbox: r.outbox.name}
		if err := found.Scan(&e.ID, &e.Partition, &e.Installation); err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	if err := found.Err(); err != nil {
		return nil, err
	}
	if got := len(list) - first; got != len(r.rows) {
		return nil, fmt.Errorf("%d rows came back for %d", got, len(r.rows))
	}
	// The ids rise in the order of the rows; RETURNING promises no order.
	slices.SortFunc(list[first:], func(a, b engine.Envelope) int { return cmp.Compare(a.ID, b.ID) })
	for i := range r.rows {
		r.fill(&list[first+i], &r.rows[i])
	}
	return list, nil
}

// fill adds to the envelope what is known without asking the database.
func (r *liteRun) fill(e *engine.Envelope, row *engine.Row) {
	e.GroupKey, e.Type, e.Payload, e.Headers = row.GroupKey, row.Type, row.Payload, row.Headers
	if len(e.Headers) == 0 {
		e.Headers = nil
	}
	e.InsertedAt = fromMicros(r.now)
	e.ScheduledAt = e.InsertedAt
	if at := r.dueAt(row); at != 0 {
		e.ScheduledAt = fromMicros(at)
	}
	e.DueAt = e.ScheduledAt
}

func nullIfEmpty(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func nullIfZero(n int64) any {
	if n == 0 {
		return nil
	}
	return n
}
