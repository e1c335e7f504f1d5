package dialect

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// A fetch is one statement, and so one snapshot: first a row that tells whether
// the lane may be touched at all (the gate), then the retries, the other due
// messages and the ready ones. Rows are read while SQLite finds them, so that
// what follows a closed gate is never looked for.
//
// ?1 is the outbox, ?2 the partition count, ?3 the partition, ?4 the time,
// ?5 the limit, ?6 and ?7 the ids and groups to be skipped, as JSON arrays.
//
// Each part names its index: a planner with statistics from when the table was
// empty, or full of dead messages, would choose to read the whole table.
const (
	fetchGate = `
SELECT COALESCE((SELECT partitions FROM {meta} WHERE outbox = ?1), 1),
	EXISTS (SELECT 1 FROM {meta} WHERE outbox = ?1 AND paused_at IS NOT NULL),
	(SELECT scheduled_at FROM {messages} INDEXED BY {due}
		WHERE {lane} AND status = 'pending' AND scheduled_at > ?4 ORDER BY scheduled_at LIMIT 1),
	{stray},
	(SELECT installation FROM {meta} WHERE outbox = ''),
	NULL, NULL, NULL, NULL`

	fetchRetries = `
UNION ALL SELECT {columns} FROM {messages} WHERE id IN (
	SELECT id FROM {messages} INDEXED BY {failed}
	WHERE {lane} AND status = 'pending' AND attempts > 0 AND scheduled_at <= ?4{waiting}{skip}
	ORDER BY scheduled_at, id LIMIT ?5)`

	fetchDue = `
UNION ALL SELECT * FROM (
	SELECT {columns} FROM {messages} INDEXED BY {due}
	WHERE {lane} AND status = 'pending' AND scheduled_at <= ?4 AND attempts = 0{failing}{skip}
	ORDER BY scheduled_at, id LIMIT ?5)`

	fetchReady = `
UNION ALL SELECT * FROM (
	SELECT {columns} FROM {messages} INDEXED BY {ready}
	WHERE {lane} AND status = 'pending' AND scheduled_at IS NULL{failing}{skip}
	ORDER BY id LIMIT ?5)`

	fetchColumns = `id, inserted_at, scheduled_at, attempts, group_key, type, headers, payload, last_error`
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

func newFetchSQL(names *strings.Replacer) map[fetchShape]string {
	all := make(map[fetchShape]string)
	for _, ordering := range []engine.Ordering{engine.ByGroup, engine.Total, engine.None} {
		for _, holdDead := range []bool{false, true} {
			for _, skip := range []bool{false, true} {
				shape := fetchShape{ordering, holdDead, skip}
				all[shape] = names.Replace(shape.text())
			}
		}
	}
	return all
}

// text composes the statement.
//
// A due retry goes out without its group's later messages: they follow when it
// has succeeded. So the page of a group is either its retry or what is ready,
// and a page that ends within the retries cannot break the order.
func (f fetchShape) text() string {
	condition := notInGroups
	switch f.ordering {
	case engine.Total:
		condition = notAny
	case engine.None:
		condition = ""
	}
	waiting, failing, stray, skip := "", "", strayPending, ""
	if condition != "" {
		waiting = fmt.Sprintf(condition, waitingHere)
		failing = fmt.Sprintf(condition, failedHere)
		if f.holdDead {
			dead := fmt.Sprintf(condition, deadHere)
			waiting, failing, stray = waiting+dead, failing+dead, strayPending+" OR "+strayDead
		}
	}
	if f.skip {
		skip = fetchSkip
	}
	text := strings.NewReplacer("{waiting}", waiting, "{failing}", failing, "{stray}", stray, "{skip}", skip).
		Replace(fetchGate + fetchRetries + fetchDue + fetchReady)
	return strings.NewReplacer("{lane}", fetchLane, "{columns}", fetchColumns).Replace(text)
}

// fetch reads a page of the lane.
func (s *SQLite) fetch(ctx context.Context, o *liteOutbox, lane engine.Lane, q engine.Query) (page engine.Page, err error) {
	shape := fetchShape{ordering: q.Ordering, holdDead: q.HoldDead}
	now := s.micros()
	args := []any{lane.Outbox, int64(lane.Partitions), int64(lane.Partition), now, int64(q.Limit)}
	if len(q.SkipIDs)+len(q.SkipGroups) > 0 {
		shape.skip = true
		args = append(args, jsonArray(q.SkipIDs), jsonArray(q.SkipGroups))
	}
	text, ok := o.fetch[shape]
	if !ok {
		return engine.Page{}, fmt.Errorf("fetch: unknown ordering %d", q.Ordering)
	}
	err = retryBusy(ctx, func() error {
		found, err := s.db.QueryContext(ctx, text, args...)
		if err != nil {
			return err
		}
		defer found.Close()
		r := fetchReader{rows: found, lane: lane, query: q, now: now}
		page, err = r.read()
		return err
	})
	if err != nil {
		return engine.Page{}, fmt.Errorf("fetch from %s: %w", o.table.Messages(), err)
	}
	return page, nil
}

// fetchReader makes a page of a fetch's rows.
type fetchReader struct {
	rows         *sql.Rows
	lane         engine.Lane
	query        engine.Query
	now          int64
	installation string
}

func (r *fetchReader) read() (engine.Page, error) {
	page := engine.Page{Now: fromMicros(r.now), NextDue: -1}
	nextDue, err := r.gate(&page)
	if err != nil || page.State != engine.PageOpen {
		return page, err
	}
	due, ready, cut, err := r.messages()
	if err != nil {
		return page, err
	}
	page.Envelopes, page.More = merge(due, ready, r.query)
	page.More = page.More || cut
	if !page.More && nextDue.Valid {
		page.NextDue = time.Duration(nextDue.Int64-r.now) * time.Microsecond
	}
	return page, nil
}

// gate reads the first row.
func (r *fetchReader) gate(page *engine.Page) (nextDue sql.NullInt64, err error) {
	var partitions int
	var paused, stray bool
	var unused any
	var installation sql.NullString
	if !r.rows.Next() {
		return nextDue, cmp.Or(r.rows.Err(), sql.ErrNoRows)
	}
	err = r.rows.Scan(&partitions, &paused, &nextDue, &stray, &installation, &unused, &unused, &unused, &unused)
	r.installation = installation.String
	switch {
	case paused:
		page.State = engine.PagePaused
	case partitions != r.lane.Partitions:
		page.State = engine.PageMoved
	case stray:
		page.State = engine.PageStray
	}
	return nextDue, err
}

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
	var scheduled sql.NullInt64
	var group, lastError sql.NullString
	var headers string
	err = r.rows.Scan(&e.ID, &inserted, &scheduled, &e.Attempts, &group, &e.Type, &headers, &e.Payload, &lastError)
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
