package dialect

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// A page is one statement, and so one snapshot: first a row that tells whether
// the lane may be touched at all (the gate), then messages. Rows are read while
// SQLite finds them, so that what follows a closed gate is never looked for.
//
// Ordinarily a lane has no message with a due time of its own: no retry, which
// alone can block others, and no delayed one. The quick statement is for that,
// and its gate tells whether it was right; otherwise the full one follows. Each
// is prepared anew for each fetch, and the full one takes three times as long.
//
// ?1 is the outbox, ?2 the partition count, ?3 the partition, ?4 the time,
// ?5 the limit, ?6 and ?7 the ids and groups to be skipped, as JSON arrays.
//
// Each part names its index: a planner with statistics from when the table was
// empty, or full of dead messages, would choose to read the whole table.
const (
	fetchGate = `
SELECT COALESCE(facts.partitions, 1), facts.paused_at IS NOT NULL,
	(SELECT scheduled_at FROM {messages} INDEXED BY {due}
		WHERE {lane} AND status = 'pending' AND scheduled_at {after} ORDER BY scheduled_at LIMIT 1),
	{stray}, tables.installation, NULL AS group_key,
	NULL AS type, NULL AS headers, NULL AS payload, NULL AS last_error
FROM {meta} tables LEFT JOIN {meta} facts ON facts.outbox = ?1 WHERE tables.outbox = ''`
	gateAny   = `IS NOT NULL`
	gateAfter = `> ?4`

	fetchRetries = `
UNION ALL SELECT {columns} FROM {messages} WHERE id IN (
	SELECT id FROM {messages} INDEXED BY {failed}
	WHERE {lane} AND status = 'pending' AND attempts > 0 AND scheduled_at <= ?4{waiting}{skip}
	ORDER BY scheduled_at, id LIMIT ?5)`

	fetchDue = `
UNION ALL SELECT * FROM (
	SELECT {columns} FROM {messages} INDEXED BY {due}
	WHERE {lane} AND status = 'pending' AND scheduled_at <= ?4 AND attempts = 0{blocked}{skip}
	ORDER BY scheduled_at, id LIMIT ?5)`

	fetchReady = `
UNION ALL SELECT * FROM (
	SELECT {columns} FROM {messages} INDEXED BY {ready}
	WHERE {lane} AND status = 'pending' AND scheduled_at IS NULL{blocked}{skip}
	ORDER BY id LIMIT ?5)`

	fetchColumns = `id, inserted_at, scheduled_at, due_at, attempts, group_key, type, headers, payload, last_error`
	fetchLane    = `outbox = ?1 AND partitions = ?2 AND partition = ?3`

	// A pending message in a lane of another count, whether it is ready, waits
	// for its retry or is not due for a week: nothing is known of its group.
	strayPending = `(` +
		`EXISTS (SELECT 1 FROM {messages} INDEXED BY {ready} WHERE outbox = ?1 AND partitions < ?2 AND status = 'pending' AND scheduled_at IS NULL) OR ` +
		`EXISTS (SELECT 1 FROM {messages} INDEXED BY {ready} WHERE outbox = ?1 AND partitions > ?2 AND status = 'pending' AND scheduled_at IS NULL) OR ` +
		`EXISTS (SELECT 1 FROM {messages} INDEXED BY {due} WHERE outbox = ?1 AND partitions < ?2 AND status = 'pending' AND scheduled_at IS NOT NULL) OR ` +
		`EXISTS (SELECT 1 FROM {messages} INDEXED BY {due} WHERE outbox = ?1 AND partitions > ?2 AND status = 'pending' AND scheduled_at IS NOT NULL))`

	// A dead message there holds its group too, if dead ones hold theirs.
	strayDead = `(` +
		`EXISTS (SELECT 1 FROM {messages} INDEXED BY {dead} WHERE outbox = ?1 AND partitions < ?2 AND status = 'dead') OR ` +
		`EXISTS (SELECT 1 FROM {messages} INDEXED BY {dead} WHERE outbox = ?1 AND partitions > ?2 AND status = 'dead'))`

	// The failed messages of the lane, and those that are not yet to be retried.
	failedHere  = `FROM {messages} INDEXED BY {failed} WHERE {lane} AND status = 'pending' AND attempts > 0 AND scheduled_at IS NOT NULL`
	waitingHere = failedHere + ` AND scheduled_at > ?4`
	deadHere    = `FROM {messages} INDEXED BY {dead} WHERE {lane} AND status = 'dead'`

	notInGroups = "\n\tAND (group_key IS NULL OR group_key NOT IN (SELECT group_key %s AND group_key IS NOT NULL))"
	notAny      = "\n\tAND NOT EXISTS (SELECT 1 %s)"

	fetchSkip = `
	AND id NOT IN (SELECT value FROM json_each(?6))
	AND (group_key IS NULL OR group_key NOT IN (SELECT value FROM json_each(?7)))`
)

// fetchShape is what distinguishes the statements of fetches.
type fetchShape struct {
	ordering engine.Ordering
	holdDead bool
	skip     bool
}

type fetchSQL struct{ quick, full string }

func newFetchSQL(names *strings.Replacer) map[fetchShape]fetchSQL {
	all := make(map[fetchShape]fetchSQL)
	for _, ordering := range []engine.Ordering{engine.ByGroup, engine.Total, engine.None} {
		for _, holdDead := range []bool{false, true} {
			for _, skip := range []bool{false, true} {
				shape := fetchShape{ordering, holdDead, skip}
				all[shape] = shape.compose(names)
			}
		}
	}
	return all
}

// compose makes the statements.
//
// A due retry goes out without its group's later messages: they follow when it
// has succeeded. So the page of a group is either its retry or what is ready,
// and a page that ends within the retries cannot break the order.
func (f fetchShape) compose(names *strings.Replacer) fetchSQL {
	condition := ""
	switch f.ordering {
	case engine.ByGroup:
		condition = notInGroups
	case engine.Total:
		condition = notAny
	}
	stray, waiting, failed, dead, skip := strayPending, "", "", "", ""
	if condition != "" {
		waiting = fmt.Sprintf(condition, waitingHere)
		failed = fmt.Sprintf(condition, failedHere)
		if f.holdDead {
			dead = fmt.Sprintf(condition, deadHere)
			stray += " OR " + strayDead
		}
	}
	if f.skip {
		skip = fetchSkip
	}
	fill := func(text, after, blocked string) string {
		text = strings.NewReplacer("{after}", after, "{stray}", stray, "{waiting}", waiting+dead, "{blocked}", blocked, "{skip}", skip).Replace(text)
		return names.Replace(strings.NewReplacer("{lane}", fetchLane, "{columns}", fetchColumns).Replace(text))
	}
	return fetchSQL{
		quick: fill(fetchGate+fetchReady, gateAny, dead),
		full:  fill(fetchGate+fetchRetries+fetchDue+fetchReady, gateAfter, failed+dead),
	}
}

// fetch reads a page of the lane.
func (s *SQLite) fetch(ctx context.Context, o *liteOutbox, lane engine.Lane, q engine.Query) (engine.Page, error) {
	shape := fetchShape{ordering: q.Ordering, holdDead: q.HoldDead}
	r := fetchReader{lane: lane, query: q, now: s.micros()}
	args := []any{lane.Outbox, int64(lane.Partitions), int64(lane.Partition), r.now, int64(q.Limit)}
	if len(q.SkipIDs)+len(q.SkipGroups) > 0 {
		shape.skip = true
		args = append(args, jsonArray(q.SkipIDs), jsonArray(q.SkipGroups))
	}
	text, ok := o.fetch[shape]
	if !ok {
		return engine.Page{}, fmt.Errorf("fetch: unknown ordering %d", q.Ordering)
	}
	err := s.read(ctx, &r, text.quick, args)
	if err == nil && r.page.State == engine.PageOpen && r.nextDue.Valid {
		r.full = true
		err = s.read(ctx, &r, text.full, args)
	}
	if err != nil {
		return engine.Page{}, fmt.Errorf("fetch from %s: %w", o.table.Messages(), err)
	}
	return r.page, nil
}

func (s *SQLite) read(ctx context.Context, r *fetchReader, text string, args []any) error {
	return retryBusy(ctx, func() error {
		found, err := s.db.QueryContext(ctx, text, args...)
		if err != nil {
			return err
		}
		defer found.Close()
		return r.read(found)
	})
}

// fetchReader makes a page of a fetch's rows.
type fetchReader struct {
	lane  engine.Lane
	query engine.Query
	now   int64
	full  bool // the rows are of the full statement

	page         engine.Page
	rows         *sql.Rows
	installation string
	nextDue      sql.NullInt64 // from the gate: of the quick statement, any due time
}

func (r *fetchReader) read(rows *sql.Rows) error {
	r.rows = rows
	r.page = engine.Page{Now: fromMicros(r.now), NextDue: -1}
	if err := r.gate(); err != nil {
		return err
	}
	if r.page.State != engine.PageOpen || r.nextDue.Valid && !r.full {
		return nil
	}
	due, ready, cut, err := r.messages()
	if err != nil {
		return err
	}
	r.page.Envelopes, r.page.More = merge(due, ready, r.query)
	r.page.More = r.page.More || cut
	if !r.page.More && r.nextDue.Valid {
		r.page.NextDue = time.Duration(r.nextDue.Int64-r.now) * time.Microsecond
	}
	return nil
}

// gate reads the first row.
func (r *fetchReader) gate() error {
	if !r.rows.Next() {
		return cmp.Or(r.rows.Err(), errNoMeta)
	}
	var partitions int
	var paused, stray bool
	var unused any
	err := r.rows.Scan(&partitions, &paused, &r.nextDue, &stray, &r.installation, &unused, &unused, &unused, &unused, &unused)
	switch {
	case paused:
		r.page.State = engine.PagePaused
	case partitions != r.lane.Partitions:
		r.page.State = engine.PageMoved
	case stray:
		r.page.State = engine.PageStray
	}
	return err
}

// errNoMeta says that the meta table lacks the row that the migrator writes.
var errNoMeta = errors.New("the meta table has no row about the table itself")

// messages reads the rows after the gate. Of each list it keeps no more than
// what alone fills a page; once the ready ones, which are the last, have done
// so, it reads no further.
func (r *fetchReader) messages() (due, ready []engine.Envelope, cut bool, err error) {
	dueBytes, readyBytes := 0, 0
	for r.rows.Next() {
		e, isDue, err := r.envelope()
		if err != nil {
			return nil, nil, false, err
		}
		if isDue {
			if cut = cut || len(due) > 0 && dueBytes > r.query.MaxBytes; !cut {
				due = append(due, e)
				dueBytes += len(e.Payload)
			}
			continue
		}
		ready = append(ready, e)
		if readyBytes += len(e.Payload); readyBytes > r.query.MaxBytes {
			return due, ready, true, nil
		}
	}
	return due, ready, cut, r.rows.Err()
}

func (r *fetchReader) envelope() (e engine.Envelope, isDue bool, err error) {
	var inserted int64
	var scheduled, since sql.NullInt64
	var group, lastError sql.NullString
	var headers string
	err = r.rows.Scan(&e.ID, &inserted, &scheduled, &since, &e.Attempts, &group, &e.Type, &headers, &e.Payload, &lastError)
	if err != nil {
		return e, false, err
	}
	if e.Headers, err = decodeHeaders(headers); err != nil {
		return e, false, fmt.Errorf("message %d: %w", e.ID, err)
	}
	e.Installation, e.Outbox, e.Partition = r.installation, r.lane.Outbox, r.lane.Partition
	e.GroupKey, e.LastError = group.String, lastError.String
	e.InsertedAt = fromMicros(inserted)
	e.ScheduledAt = e.InsertedAt
	if scheduled.Valid {
		e.ScheduledAt = fromMicros(scheduled.Int64)
	}
	switch {
	case since.Valid:
		e.DueAt = fromMicros(since.Int64)
	case e.Attempts == 0:
		e.DueAt = e.ScheduledAt
	default:
		e.DueAt = e.InsertedAt
	}
	return e, scheduled.Valid, nil
}

// fromMicros is the instant that the database holds as n.
func fromMicros(n int64) time.Time { return time.UnixMicro(n).UTC() }

// jsonArray gives the list in the form that json_each reads.
func jsonArray[T any](list []T) string {
	if len(list) == 0 {
		return "[]"
	}
	text, _ := json.Marshal(list) // ids and valid strings always can be
	return string(text)
}
