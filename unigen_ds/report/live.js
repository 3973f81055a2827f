// A served page asks for the present one, and exchanges its parts: scrolling and open details stay as they are.
(function(){
  var note=document.getElementById('live'),tag=null,since='';
  function name(d){var part=d.closest('section'),head=d.querySelector('summary').textContent;
    return (part?part.id:'')+head.replace(/[0-9,]+/g,'')}
  function exchange(text){
    var page=new DOMParser().parseFromString(text,'text/html'),open={},images={};
    document.querySelectorAll('details[open]').forEach(function(d){open[name(d)]=true});
    page.querySelectorAll('details').forEach(function(d){d.open=name(d) in open});
    document.querySelectorAll('img').forEach(function(i){images[i.src]=i});
    page.querySelectorAll('img').forEach(function(i){if(images[i.src])i.replaceWith(images[i.src])});
    ['header','main','footer'].forEach(function(part){
      document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)))});
    document.title=page.title;addCursors()}
  function renew(){
    fetch('/',{cache:'no-cache'}).then(function(answer){return answer.text().then(function(text){
      if(!answer.ok)throw new Error(text);
      if(answer.headers.get('ETag')!==tag){exchange(text);tag=answer.headers.get('ETag')}
      since=new Date().toLocaleTimeString();note.className='chip good';note.textContent='live, '+since})
    }).catch(function(error){note.className='chip warn';
      note.textContent='not live'+(since?' since '+since:'')+': '+error.message.slice(0,60)
    }).finally(function(){setTimeout(renew,1000*note.dataset.seconds)})}
  setTimeout(renew,1000*note.dataset.seconds)})();
