package gormoutbox_test

import (
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"testing"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/gormoutbox/outbox/gormoutbox"
)

// Models with all kinds of associations.
type (
	Author struct {
		ID      int64
		Name    string `gorm:"uniqueIndex"`
		Age     int
		Profile Profile
		Books   []Book
		Tags    []Tag `gorm:"many2many:author_tags"`
		Version int
		Created time.Time
		Deleted gorm.DeletedAt
	}
	Profile struct {
		ID       int64
		AuthorID int64
		Text     string
	}
	Book struct {
		ID       int64
		AuthorID *int64
		Author   *Author
		Title    string
	}
	Tag struct {
		ID   int64
		Name string
	}
)

// BeforeSave and AfterDelete are hooks that use the database.
func (a *Author) BeforeSave(*gorm.DB) error {
	a.Version++
	if a.Name == "refused" {
		return errors.New("refused by the hook")
	}
	return nil
}

func (a *Author) AfterDelete(tx *gorm.DB) error {
	return tx.Model(&Tag{}).Create(&Tag{Name: "deleted " + a.Name}).Error
}

// script is ordinary work with GORM; it notes what it sees.
type script struct {
	t     *testing.T
	db    *gorm.DB
	notes []string
}

func (s *script) note(what string, values ...any) {
	s.notes = append(s.notes, what+": "+fmt.Sprintf("%+v", values))
}

// done notes the outcome of a statement.
func (s *script) done(what string, db *gorm.DB) {
	s.note(what, db.RowsAffected, db.Error)
}

func (s *script) create() {
	jane := Author{
		Name: "jane", Age: 40, Profile: Profile{Text: "p"},
		Books: []Book{{Title: "one"}, {Title: "two"}}, Tags: []Tag{{Name: "a"}, {Name: "b"}},
	}
	s.done("create", s.db.Create(&jane))
	s.note("ids", jane.ID, jane.Profile, len(jane.Books), jane.Tags, jane.Version)
	s.done("duplicate", s.db.Create(&Author{Name: "jane"}))
	s.done("refused", s.db.Create(&Author{Name: "refused"}))
	s.done("upsert", s.db.Clauses(clause.OnConflict{
		Columns: []clause.Column{{Name: "name"}}, DoUpdates: clause.Assignments(map[string]any{"age": 41}),
	}).Create(&Author{Name: "jane"}))
	many := make([]Author, 7)
	for i := range many {
		many[i] = Author{Name: fmt.Sprintf("author %d", i), Age: i}
	}
	s.done("batches", s.db.CreateInBatches(&many, 3))
	s.done("map", s.db.Model(&Tag{}).Create(map[string]any{"name": "from a map"}))
	var tag Tag
	s.done("first or create", s.db.Where(Tag{Name: "new"}).FirstOrCreate(&tag))
	s.done("save", s.db.Save(&Tag{ID: tag.ID, Name: "saved"}))
}

func (s *script) read() {
	var a Author
	s.done("preload", s.db.Preload("Books").Preload(clause.Associations).First(&a, "name = ?", "jane"))
	s.note("preloaded", a.Name, a.Age, a.Profile.Text, len(a.Books), len(a.Tags), a.Created.UTC())
	var books []Book
	s.done("joins", s.db.Joins("Author").Where("\"Author\".\"name\" = ?", "jane").Order("books.id").Find(&books))
	s.done("nothing", s.db.Take(&Author{}, "name = ?", "nobody"))
	var batch []Author
	s.done("batches", s.db.Where("age < ?", 10).FindInBatches(&batch, 3, func(tx *gorm.DB, n int) error {
		s.note("batch", n, len(batch), tx.RowsAffected)
		return nil
	}))
	var list []string
	s.done("pluck", s.db.Model(&Author{}).Order("name").Pluck("name", &list))
	var n int64
	s.done("count", s.db.Model(&Author{}).Where("age > ?", 2).Count(&n))
	s.note("found", list, n)
	var total struct{ Sum, Max int }
	s.done("raw", s.db.Raw("SELECT sum(age) AS sum, max(age) AS max FROM authors WHERE name LIKE @like", sql.Named("like", "author%")).Scan(&total))
	s.done("sub query", s.db.Where("age = (?)", s.db.Model(&Author{}).Select("max(age)")).Find(&batch))
	s.note("totals", total, len(batch))
	s.note("sql", s.db.ToSQL(func(tx *gorm.DB) *gorm.DB { return tx.Where("age IN ?", []int{1, 2}).Find(&batch) }))
	s.rows()
}

func (s *script) rows() {
	result, err := s.db.Model(&Author{}).Where("age > ?", 3).Order("age").Rows()
	if err != nil {
		s.t.Fatal(err)
	}
	defer result.Close()
	for result.Next() {
		var a Author
		s.note("row", s.db.ScanRows(result, &a), a.Name)
	}
	var name string
	row := s.db.Table("authors").Where("age = ?", 5).Select("name").Row()
	s.note("one row", row.Scan(&name), name, result.Err())
}

func (s *script) change() {
	s.done("update", s.db.Model(&Author{}).Where("age = ?", 1).Update("age", gorm.Expr("age + ?", 100)))
	s.done("updates", s.db.Model(&Author{}).Where("age = ?", 2).Updates(map[string]any{"age": 20, "name": "twenty"}))
	var returned []Tag
	s.done("returning", s.db.Model(&returned).Clauses(clause.Returning{}).Where("name = ?", "a").Update("name", "A"))
	s.note("returned", returned)
	s.done("everything", s.db.Model(&Tag{}).Update("name", "x"))
	s.done("exec", s.db.Exec("UPDATE tags SET name = ? WHERE name IN ?", "c", []string{"b", "c"}))
	s.done("bad sql", s.db.Exec("UPDATE nowhere SET x = 1"))

	var a Author
	s.db.First(&a, "name = ?", "jane")
	books := s.db.Model(&a).Association("Books")
	s.note("append", books.Append(&Book{Title: "three"}), books.Count())
	s.note("replace tags", s.db.Model(&a).Association("Tags").Replace(&Tag{Name: "only"}))
	s.note("tags", s.db.Model(&a).Association("Tags").Count())
	s.note("clear", books.Clear(), books.Count())
	s.done("delete", s.db.Select("Profile").Delete(&a))
	s.done("soft deleted", s.db.Take(&Author{}, "name = ?", "jane"))
	s.done("unscoped", s.db.Unscoped().Where("name = ?", "jane").Delete(&Author{}))
	s.done("hard", s.db.Delete(&Tag{}, "name = ?", "c"))
	dry := s.db.Session(&gorm.Session{DryRun: true}).Create(&Tag{Name: "dry"})
	s.note("dry run", dry.Error, dry.Statement.SQL.String())
}

func (s *script) transactions() {
	tag := func(tx *gorm.DB, name string) error { return tx.Create(&Tag{Name: name}).Error }
	s.note("transaction", s.db.Transaction(func(tx *gorm.DB) error {
		_ = tx.Transaction(func(tx *gorm.DB) error { _ = tag(tx, "lost"); return errRollBack })
		return tx.Session(&gorm.Session{SkipHooks: true}).Transaction(func(tx *gorm.DB) error { return tag(tx, "nested") })
	}, &sql.TxOptions{Isolation: sql.LevelSerializable}))
	s.note("failed", s.db.Transaction(func(tx *gorm.DB) error { _ = tag(tx, "lost"); return errRollBack }))
	s.note("not nested", s.db.Session(&gorm.Session{DisableNestedTransaction: true}).Transaction(func(tx *gorm.DB) error {
		return tx.Transaction(func(tx *gorm.DB) error { return tag(tx, "flat") })
	}))
	s.note("no default", tag(s.db.Session(&gorm.Session{SkipDefaultTransaction: true}), "alone"))

	tx := s.db.Begin()
	s.note("begin", tx.Error, tag(tx, "kept"))
	s.done("savepoint", tx.SavePoint("sp"))
	s.note("lost", tag(tx, "lost"))
	s.done("rollback to", tx.RollbackTo("sp"))
	s.done("a begin within", tx.Begin())
	s.done("commit", tx.Commit())
	s.note("again", tx.Commit().Error)
	s.note("after", tag(tx.Session(&gorm.Session{NewDB: true}), "late"))
	s.note("no transaction", s.db.Session(&gorm.Session{}).Commit().Error, s.db.Session(&gorm.Session{}).Rollback().Error)
	s.done("rollback", s.db.Begin().Rollback())

	s.note("connection", s.db.Connection(func(conn *gorm.DB) error {
		return conn.Transaction(func(tx *gorm.DB) error { return tag(tx, "on a connection") })
	}))
	s.note("in a transaction", s.db.Transaction(func(tx *gorm.DB) error {
		s.db = tx
		s.rows()
		_, err := tx.DB()
		return errors.Join(err, tag(tx.Session(&gorm.Session{PrepareStmt: true}), "cached"))
	}))
}

func (s *script) readOnly() {
	s.note("read only", s.db.Transaction(func(tx *gorm.DB) error {
		return tx.Create(&Tag{Name: "not allowed"}).Error
	}, &sql.TxOptions{ReadOnly: true}))
}

func (s *script) migrate() {
	models := []any{&Author{}, &Profile{}, &Book{}, &Tag{}}
	m := s.db.Migrator()
	s.note("migrate", s.db.AutoMigrate(models...), s.db.AutoMigrate(models...))
	types, err := m.ColumnTypes(&Author{})
	for _, c := range types {
		s.note("column", c.Name(), c.DatabaseTypeName())
	}
	s.note("schema", err, m.HasTable("author_tags"), m.HasIndex(&Author{}, "Name"), m.HasColumn(&Tag{}, "nothing"))
}

// random are the names that GORM gives to savepoints.
var random = regexp.MustCompile(`sp\d+`)

// run does everything and returns what came of it, and each SQL text.
func (s *script) run(log *recorder) []string {
	s.migrate()
	log.traces = nil // the migrator goes through a map
	s.create()
	s.read()
	s.change()
	db := s.db
	s.transactions()
	s.db = db
	s.readOnly()
	var tags []Tag
	s.done("in the end", s.db.Order("id").Find(&tags))
	s.note("tags", tags)
	for _, list := range [][]string{log.traces, log.errors} {
		for _, line := range list {
			s.notes = append(s.notes, random.ReplaceAllString(line, "sp"))
		}
	}
	return s.notes
}

// What GORM does with the wrapper is what it does without: the same results,
// the same errors, the same SQL.
func TestGORMGoesOnUnchanged(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		var outcomes [2][]string
		for i := range outcomes {
			log := newRecorder()
			now := time.Date(2026, 11, 5, 12, 0, 0, 0, time.UTC)
			db, err := gorm.Open(b.dialector(b.sql(t)), &gorm.Config{
				Logger: log, NowFunc: func() time.Time { return now }, TranslateError: true, CreateBatchSize: 5,
				PrepareStmt: b.cached,
			})
			if err != nil {
				t.Fatal(err)
			}
			if i == 1 {
				if err := gormoutbox.Install(db); err != nil {
					t.Fatal(err)
				}
			}
			outcomes[i] = (&script{t: t, db: b.use(db)}).run(log)
		}
		bare, wrapped := outcomes[0], outcomes[1]
		if len(bare) < 140 {
			t.Errorf("only %d things were compared", len(bare))
		}
		if slices.Equal(bare, wrapped) {
			return
		}
		for i := range min(len(bare), len(wrapped)) {
			if bare[i] != wrapped[i] {
				t.Fatalf("without: %s\n   with: %s", bare[i], wrapped[i])
			}
		}
		t.Fatalf("%d things without the wrapper, %d with", len(bare), len(wrapped))
	})
}
